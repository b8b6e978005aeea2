"""Qwen2 and Qwen2.5: the shared decoder with biases on q, k and v, which come with the parameters."""

from services.common.errors import EngineError, ErrorReason
from services.worker.model_config import ModelConfig
from services.worker.models.decoder import Decoder, Parameters


class Qwen2(Decoder):
    """Differs from Llama by its biases only."""

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        if not config.has_qkv_bias:
            raise EngineError(ErrorReason.MODEL_LOAD_FAILED, "a qwen2 model must have q, k and v biases")
        super().__init__(config, parameters)
