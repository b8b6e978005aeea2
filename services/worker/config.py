"""Configuration of a worker."""

from dataclasses import dataclass
from typing import Literal

from services.common.config import ServiceConfig, require_config

Dtype = Literal["float32", "bfloat16"]
Device = Literal["auto", "cpu"]
Backend = Literal["auto", "native", "torch"]
Activations = Literal["auto", "bfloat16", "int8", "rotated"]
Quantization = Literal["none", "int8", "int4"]
KvDtype = Literal["auto", "bfloat16", "float32", "int8"]
SwapCompression = Literal["none", "int8"]
Speculation = Literal["none", "ngram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """What a worker needs to load one model and execute steps of it."""

    model: str = ""
    """Path of a Hugging Face directory or a GGUF file. Required."""

    model_name: str = ""
    """Name under which the model is served; empty: the one in its files."""

    device: Device = "auto"
    """Where to run; `auto` takes the best there is. Only `cpu` exists yet."""

    backend: Backend = "auto"
    """What computes: `native`, our engine for CPUs, or `torch`; `auto` takes `native` where it was built and knows the
    model's number formats."""

    dtype: Dtype = "bfloat16"
    """Precision. `bfloat16`: `native` runs weights in the format of their files and computes in float32 between
    layers, `torch` converts everything to bfloat16. `float32` is the reference: all weights decoded, several times
    the memory and slower."""

    quantization: Quantization = "none"
    """What weights that are stored as floating numbers are converted to at load: `int8` or `int4` (blocks of 32);
    `native` only."""

    activation_bits: int = 16
    """How exactly linear layers compute in the native engine. `16`: in bfloat16 on machines with AMX, weights too,
    decoded on their way, as models are commonly run; elsewhere two int8 codes an activation. `32`: weights exact and
    activations as two terms, which leaves the answers of the float32 reference. `8`: codes of eight bits, the
    fastest; on machines with AMX all linear layers then have eight bits, whatever their files hold."""

    activations: Activations = "auto"
    """What activations are: `bfloat16`, one number or, with 32 bits, two, fast on machines with AMX, slow on others;
    `int8`, codes with a scale for every 32, one or two, fast on any machine; `rotated`, codes with one scale for a
    rotated row, for 8 bits; `auto` takes what is fastest. Name one where workers on different machines must give the
    same answers."""

    kv_dtype: KvDtype = "auto"
    """Type of keys and values; `auto`: the dtype. Others than the dtype, and `int8` (a scale a token and head), need
    `native`."""

    block_size: int = 32
    """Token slots a KV block: a request wastes less than a block, prefixes are shared by whole blocks. `native` has the
    values of 32 tokens meet their weights at once, and copies them together where blocks are smaller."""

    kv_cache_gib: float = 0.0
    """Memory for keys and values, in GiB; 0: a quarter of what is free after the weights, at most 4 GiB, at most
    what 64 requests of the longest length need."""

    swap_space_gib: float = 0.0
    """Host memory for blocks that the KV cache has no room for, in GiB: what preempted requests and past prompts left
    is brought back from there instead of being computed again. 0: it is computed again."""

    swap_compression: SwapCompression = "none"
    """How blocks are written in that memory: `int8` (a scale a token and head) holds about twice as many of bfloat16,
    and changes what comes back by up to 1/254 of the largest number beside it, so outputs may change."""

    max_model_len: int = 0
    """Longest prompt and output together, in tokens; 0: what the model was made for, or what fits the KV cache."""

    max_num_batched_tokens: int = 544
    """Most tokens that one step may compute; bounds the activations' memory and a step's time."""

    max_run_ahead_depth: int = 4
    """Most plans that may wait on the stream; a scheduler that asks for more is refused."""

    num_threads: int = 0
    """Compute threads; 0: one a core."""

    speculation: Speculation = "none"
    """Whether tokens are guessed in advance and verified in the same step, which changes no output: `ngram` guesses
    what followed the last tokens of a request when they occurred before in it. Pays where text repeats itself; `native`
    only."""

    speculation_tokens: int = 4
    """Most tokens guessed for a row."""

    speculation_min_ngram: int = 2
    """Fewest last tokens that must have occurred before; fewer mean more guesses, more of them wrong."""

    speculation_max_ngram: int = 4
    """Most last tokens that are compared; the longest match is taken."""

    poison_new_blocks: bool = False
    """Fill blocks with NaN before a request gets them, so that a read of stale memory shows; for tests."""

    def __post_init__(self) -> None:
        """Check ranges."""
        super(WorkerConfig, self).__post_init__()
        require_config(bool(self.model), "model", "is required: a Hugging Face directory or a GGUF file")
        require_config(self.activation_bits in (8, 16, 32), "activation_bits", "must be 8, 16 or 32")
        possible = {"bfloat16": (16, 32), "rotated": (8,)}.get(self.activations, (8, 16, 32))
        text = f"must be {' or '.join(map(str, possible))} with activations {self.activations}"
        require_config(self.activation_bits in possible, "activation_bits", text)
        require_config(self.block_size >= 1, "block_size", "must be at least 1")
        require_config(self.kv_cache_gib >= 0, "kv_cache_gib", "must not be negative")
        require_config(self.swap_space_gib >= 0, "swap_space_gib", "must not be negative")
        require_config(self.max_model_len >= 0, "max_model_len", "must not be negative")
        require_config(self.max_num_batched_tokens >= 1, "max_num_batched_tokens", "must be at least 1")
        require_config(self.max_run_ahead_depth >= 1, "max_run_ahead_depth", "must be at least 1")
        require_config(self.num_threads >= 0, "num_threads", "must not be negative")
        require_config(1 <= self.speculation_tokens <= 32, "speculation_tokens", "must be in 1..32")
        lengths = 1 <= self.speculation_min_ngram <= self.speculation_max_ngram <= 16
        require_config(
            lengths,
            "speculation_min_ngram",
            "must be at least 1 and at most speculation_max_ngram, which is at most 16",
        )
