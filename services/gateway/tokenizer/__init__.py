"""Text to token ids and back, for a model given as a Hugging Face directory or a GGUF file."""

from services.gateway.tokenizer.loading import load_tokenizer
from services.gateway.tokenizer.tokenizer import Tokenizer, TokenizerFacts

__all__ = ["Tokenizer", "TokenizerFacts", "load_tokenizer"]
