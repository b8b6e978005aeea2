"""From a model's files to a runner that can execute steps: metadata, choice of a backend, and that backend's loading.

Everything that can refuse does so before anything large is read or allocated. A backend's module is imported when it
was chosen: a worker on the native engine never imports torch.
"""

import logging
from dataclasses import replace
from pathlib import Path

from services.common.clock import Clock
from services.common.errors import EngineError, ErrorReason
from services.worker.config import WorkerConfig
from services.worker.host_costs import HostCosts, measure_host_costs
from services.worker.load_progress_log import LoadProgressLog
from services.worker.loaded_model import LoadedModel
from services.worker.weights import Checkpoint, open_checkpoint

logger = logging.getLogger(__name__)


def load_model(config: WorkerConfig, clock: Clock) -> LoadedModel:
    """Load the model that the config names. Runs on the device thread; takes up to seconds.

    Raises:
        EngineError: MODEL_LOAD_FAILED or INVALID_CONFIG, saying what to change.
    """
    started_s = clock.monotonic_s()
    checkpoint = open_checkpoint(Path(config.model))
    progress = LoadProgressLog(clock)
    if (reason := why_not_native(config, checkpoint)) is None:
        from services.worker.native.loading import load_native

        backend, loaded = "native", load_native(config, checkpoint, clock, progress)
    elif config.backend == "native":
        raise EngineError(ErrorReason.INVALID_CONFIG, f"backend is native, but {reason}", field="backend")
    else:
        if config.backend == "auto":
            logger.info("torch computes: %s", reason)
        from services.worker.torch_loading import load_torch

        backend, loaded = "torch", load_torch(config, checkpoint, clock, progress)
    if loaded.num_host_blocks:
        loaded = replace(loaded, host_costs=_measure_host_costs(config, loaded, clock))
    fields = {
        "model": loaded.name,
        "backend": backend,
        "dtype": loaded.dtype,
        "num_blocks": loaded.num_blocks,
        "num_host_blocks": loaded.num_host_blocks,
        "max_model_len": loaded.max_model_len,
    }
    logger.info("model loaded in %.2f s", clock.monotonic_s() - started_s, extra={"fields": fields})
    return loaded


def _measure_host_costs(config: WorkerConfig, loaded: LoadedModel, clock: Clock) -> HostCosts:
    return measure_host_costs(
        loaded.runner,
        clock,
        max_num_tokens=min(config.max_num_batched_tokens, loaded.max_model_len),
        num_blocks=loaded.num_blocks,
        num_host_blocks=loaded.num_host_blocks,
        block_size=config.block_size,
    )


def why_not_native(config: WorkerConfig, checkpoint: Checkpoint) -> str | None:
    """Say what keeps the native engine from running a model as configured; None if nothing does."""
    if config.backend == "torch":
        return "torch is asked for"
    from services.worker.native.recipe import unsupported_formats
    from treadle_kernels.cpu import unavailable_reason

    if (reason := unavailable_reason()) is not None:
        return reason
    if config.block_size % 16:
        return f"block_size is {config.block_size}, and the engine needs a multiple of 16"
    if formats := unsupported_formats(checkpoint):
        return f"the engine has no code for weights in {', '.join(formats)}"
    return None
