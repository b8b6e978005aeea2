"""Puts BOS before and EOS behind every text that is encoded with special tokens."""

from tokenizers import Tokenizer as Backend
from tokenizers import processors


def surround(backend: Backend, *, bos: str | None, eos: str | None) -> None:
    """Replace the post-processor by one that adds the given tokens; a text that is no token adds nothing.

    Modifies: ``backend``.
    """
    ids = {text: token_id for text in (bos, eos) if text and (token_id := backend.token_to_id(text)) is not None}
    template = [*([bos] if bos in ids else []), "$A", *([eos] if eos in ids else [])]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(ids.items()))
