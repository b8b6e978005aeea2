"""How much memory keys and values get, and how many blocks and tokens that is."""

from services.common.errors import EngineError, ErrorReason
from services.worker.config import WorkerConfig
from services.worker.weights import MemoryPlan

_GIB = 1 << 30
_DEFAULT_KV_SHARE = 0.25
_DEFAULT_KV_LIMIT_BYTES = 4 * _GIB
_DEFAULT_KV_REQUESTS = 64
"""Requests of the longest length that the default KV cache holds at most; a small model needs no gigabytes."""


def plan_num_blocks(
    config: WorkerConfig, plan: MemoryPlan, free_bytes: int, *, block_bytes: int, trained_len: int
) -> int:
    """Choose the size of the KV cache and check that it fits beside the weights. Pure.

    Args:
        config: Says how much, or leaves it to the default.
        plan: What the weights take.
        free_bytes: What the host can still give out.
        block_bytes: Bytes of a block.
        trained_len: Longest prompt and output that the model was made for.

    Returns:
        Blocks, the null block included.

    Raises:
        EngineError: MODEL_LOAD_FAILED: weights and cache do not fit; INVALID_CONFIG: the cache holds no block.
    """
    if config.kv_cache_gib:
        kv_bytes = round(config.kv_cache_gib * _GIB)
    else:
        most_blocks = _DEFAULT_KV_REQUESTS * (trained_len // config.block_size + 1) + 1
        share_bytes = round((free_bytes - plan.weights_bytes) * _DEFAULT_KV_SHARE)
        kv_bytes = min(_DEFAULT_KV_LIMIT_BYTES, share_bytes, most_blocks * block_bytes)
    plan.check(free_bytes, kv_cache_bytes=max(kv_bytes, 0) + round(config.swap_space_gib * _GIB))
    return num_blocks_for(kv_bytes, block_bytes)


def plan_num_host_blocks(config: WorkerConfig, stored_bytes: int) -> int:
    """Choose the size of the host tier, of which a block takes ``stored_bytes``. Pure.

    Raises:
        EngineError: INVALID_CONFIG: host memory is asked for and holds no block.
    """
    num_bytes = round(config.swap_space_gib * _GIB)
    if 0 < num_bytes < stored_bytes:
        text = f"swap_space_gib is {config.swap_space_gib}, and a block takes {stored_bytes} bytes"
        raise EngineError(ErrorReason.INVALID_CONFIG, text, field="swap_space_gib")
    return num_bytes // stored_bytes


def num_blocks_for(num_bytes: int, block_bytes: int) -> int:
    """How many blocks, the null block included, fit in some memory. Pure.

    Raises:
        EngineError: INVALID_CONFIG: not even one block beside the null block fits.
    """
    num_blocks = num_bytes // block_bytes
    if num_blocks < 2:
        raise EngineError(
            ErrorReason.INVALID_CONFIG,
            f"{num_bytes} bytes of KV cache hold {num_blocks} blocks of {block_bytes} bytes; give it at least "
            f"{2 * block_bytes} bytes",
            field="kv_cache_bytes",
            needed_bytes=str(2 * block_bytes),
        )
    return num_blocks


def plan_max_model_len(config: WorkerConfig, trained_len: int, num_blocks: int) -> int:
    """Longest prompt and output together: as configured, else what the model was made for or the cache holds. Pure.

    Raises:
        EngineError: INVALID_CONFIG: more is asked for than the model or the cache can do.
    """
    num_slots = (num_blocks - 1) * config.block_size
    if config.max_model_len > trained_len:
        text = f"max_model_len is {config.max_model_len}, but the model was made for {trained_len}"
        raise EngineError(ErrorReason.INVALID_CONFIG, text, field="max_model_len")
    if config.max_model_len > num_slots:
        text = f"max_model_len is {config.max_model_len}, but the KV cache holds {num_slots} tokens; raise kv_cache_gib"
        raise EngineError(ErrorReason.INVALID_CONFIG, text, field="max_model_len")
    return min(config.max_model_len or trained_len, num_slots)
