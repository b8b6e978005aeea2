"""Native models over the paged KV cache: one decoder, one file for what each family does differently."""

from services.worker.models.decoder import Decoder
from services.worker.models.registry import build_model

__all__ = ["Decoder", "build_model"]
