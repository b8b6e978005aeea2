"""From a request's output tokens to its text: a deterministic fold that every surface shares.

Guarantees: whatever the grouping of the tokens, the joined text, the stop and the counts are the same; text is never
empty in a delta that is only text; the token that ended the output is counted and not shown unless asked for. A stream
that is resumed elsewhere is rebuilt by folding its tokens again. Pure but for its own state.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.gateway.core.stop_strings import StopStrings
from services.gateway.detokenizer import Detokenizer
from services.gateway.ports import Finish, FinishReason, TokenEvent
from services.gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OutputRule:
    """How tokens become text.

    Attributes:
        stop_strings: Texts that end the output.
        stop_text_by_id: Stop strings that are special tokens, which skipping would keep out of the text, by token id.
        stop_token_ids: The client's own end tokens.
        includes_stop: Whether what stopped the output stays in the text.
        skips_special_tokens: Whether control tokens are left out of the text.
        at_text_start: Whether the output is a text of its own and not the continuation of the prompt's.
    """

    stop_strings: tuple[str, ...]
    stop_text_by_id: Mapping[int, str]
    stop_token_ids: frozenset[int]
    includes_stop: bool
    skips_special_tokens: bool
    at_text_start: bool


@dataclass(frozen=True, slots=True)
class Folded:
    """What one event gave.

    Attributes:
        text: Text that became certain; may be empty.
        num_tokens: Output tokens that count so far, this event's included.
        is_end: Nothing follows.
        stop: The stop string that ended the output, if one did.
    """

    text: str
    num_tokens: int
    is_end: bool
    stop: str | None


class OutputFold:
    """The fold of one request."""

    def __init__(self, tokenizer: Tokenizer, rule: OutputRule) -> None:
        self._rule = rule
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=rule.skips_special_tokens, at_text_start=rule.at_text_start
        )
        self._stops = StopStrings(rule.stop_strings, include_stop=rule.includes_stop)
        self._has_stops = bool(rule.stop_strings)
        self._num_tokens = 0

    def take(self, event: TokenEvent) -> Folded:
        """Fold the next event; not to be called after the end."""
        finish = event.finish
        visible = event.token_ids
        if finish is not None and finish.stop_token_id is not None and not self._rule.includes_stop:
            visible = visible[:-1]
        text = ""
        if not self._has_stops:
            text = self._detokenizer.feed(visible)
        else:
            for index, token_id in enumerate(visible):
                # One at a time, so that the count is the same however the tokens arrived.
                scan = self._stops.feed(self._detokenizer.feed((token_id,)))
                text += scan.text
                if scan.stop is not None:
                    return self._ended(text, event.seq + index + 1, scan.stop)
        self._num_tokens = event.seq + len(event.token_ids)
        if finish is None:
            return Folded(text, self._num_tokens, is_end=False, stop=None)
        return self._flushed(text, finish)

    def _flushed(self, text: str, finish: Finish) -> Folded:
        """End the output where the scheduler ended it."""
        scan = self._stops.feed(self._detokenizer.flush())
        text += scan.text
        if scan.stop is not None:
            return self._ended(text, self._num_tokens, scan.stop)
        text += self._stops.flush()
        stop = None if finish.stop_token_id is None else self._rule.stop_text_by_id.get(finish.stop_token_id)
        if stop is not None and self._rule.includes_stop and self._rule.skips_special_tokens:
            text += stop
        return self._ended(text, self._num_tokens, stop)

    def _ended(self, text: str, num_tokens: int, stop: str | None) -> Folded:
        self._num_tokens = num_tokens
        return Folded(text, num_tokens, is_end=True, stop=stop)


def stop_reason(finish: Finish | None, stop: str | None, rule: OutputRule) -> str | int | None:
    """Say what ended the output: a stop string, the client's end token; None for the model's own end or the limit."""
    if stop is not None:
        return stop
    if finish is None or finish.reason is not FinishReason.STOP or finish.stop_token_id not in rule.stop_token_ids:
        return None
    return finish.stop_token_id
