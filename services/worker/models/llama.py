"""Llama and the families that share its every tensor: SmolLM2, and Mistral with its sliding window.

Nothing differs from the shared decoder. The window is data: the step's rows carry it to attention.
"""

from services.worker.models.decoder import Decoder


class Llama(Decoder):
    """Rotary grouped-query attention, SwiGLU, RMS norms before each; biases only where the config says so."""
