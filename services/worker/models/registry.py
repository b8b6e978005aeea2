"""Which module runs which family."""

from collections.abc import Iterable

import torch

from services.common.errors import EngineError, ErrorReason
from services.worker.model_config import ModelConfig, ModelFamily
from services.worker.models.decoder import Decoder
from services.worker.models.llama import Llama
from services.worker.models.parameters import assemble
from services.worker.models.qwen2 import Qwen2
from services.worker.models.qwen3 import Qwen3

MODEL_CLASS_BY_FAMILY: dict[ModelFamily, type[Decoder]] = {
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}


def build_model(
    config: ModelConfig,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Decoder:
    """Build a model from its checkpoint's tensors.

    Args:
        config: Shape of the model.
        weights: ``(name, tensor)`` in any order, Hugging Face names less the ``model.`` prefix, consumed one by one.
        dtype: Of weights, activations and KV: float32 or bfloat16.
        device: Where it runs; None is the CPU.

    Raises:
        EngineError: MODEL_LOAD_FAILED: the tensors are not those of the config.
    """
    parameters = assemble(config, weights, dtype, device or torch.device("cpu"))
    model = MODEL_CLASS_BY_FAMILY[config.family](config, parameters)
    if parameters:
        some = ", ".join(sorted(parameters)[:3])
        raise EngineError(ErrorReason.MODEL_LOAD_FAILED, f"a {config.family} model has no use for {some}")
    return model
