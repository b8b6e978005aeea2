"""Turns a stream of token ids into text deltas that are always whole characters.

Guarantees: a deterministic fold over the ids, so that a stream resumed elsewhere is rebuilt by feeding its ids again;
however the ids are grouped, the deltas and the flush join to the same text; each token costs time in its own length
only. Bytes that begin a character are held back until it is complete; what never completes becomes U+FFFD once.
"""

import codecs
from collections.abc import Iterable

from services.gateway.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental decoder of one generation.

    Args:
        tokenizer: Gives the bytes of each id; ids it does not know add nothing.
        skip_special_tokens: Whether control tokens are left out of the text.
        at_text_start: Whether the ids are a text of their own rather than the continuation of a prompt. Only then is
            the leading space dropped that a SentencePiece tokenizer puts before every text: a continuation keeps it,
            since it separates the first word from the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, at_text_start: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._must_drop_space = at_text_start and tokenizer.drops_leading_space
        self._decoder = _Utf8Decoder("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """Take the next ids and give the text that has become certain; often "" inside a character."""
        tokenizer, skips = self._tokenizer, self._skips_special
        data = b"".join([tokenizer.token_bytes(i) for i in token_ids if not (skips and tokenizer.is_special(i))])
        if data and self._must_drop_space:
            self._must_drop_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """End the text: give what was held back, as U+FFFD; "" when nothing was, or on a second call."""
        return self._decoder.decode(b"", final=True)
