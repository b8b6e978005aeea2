"""Guesses at what a request says next, from what it has said before: prompt lookup.

When the last few tokens of a request have occurred before in its own prompt or output, what followed them then is
drafted to follow them now. Of several matches the longest counts, among equally long ones the latest. A draft may be
twice as long as what came true of the one before, and one token: so text that repeats itself little costs little.
Guarantees: drafts are a pure function of the tokens, the settings and what plans allowed, so a recorded plan drafts
again what it drafted; a wrong draft costs time, never a wrong token, for each is verified in the step that computes it.

Source: Saxena, Prompt Lookup Decoding, 2023 (the idea), and the n-gram proposer of vLLM (longest match first). New
here: an index instead of a search, and a copy that goes on into what it has itself drafted, as in Ziv and Lempel's
LZ77.
"""

from collections.abc import Iterable
from dataclasses import dataclass

_FEW = 8
"""So many new n-grams are entered one by one, which is faster; more, such as those of a prompt, all at once."""


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """What is drafted.

    Attributes:
        max_draft_tokens: Most tokens of a draft.
        min_ngram: Fewest tokens that must match.
        max_ngram: Most tokens that are looked at; a longer match counts no more than one of this length.
    """

    max_draft_tokens: int
    min_ngram: int
    max_ngram: int


class TokenHistory:
    """All tokens of one request, and where each n-gram of them was seen last.

    The index holds about 0.12 KB a token and length of n-gram, a percent or two of its keys and values. It is
    built with the first draft, so a request that never drafts has none.

    Args:
        token_ids: Those known so far.
        settings: Lengths of the n-grams.
    """

    __slots__ = ("_draft", "_draft_end", "_max_num_tokens", "_num_indexed", "_places_by_length", "_token_ids")

    def __init__(self, token_ids: Iterable[int], settings: DraftSettings) -> None:
        self._token_ids = list(token_ids)
        # Longest first. Each maps an n-gram to the index of the token that followed its last occurrence.
        self._places_by_length: list[tuple[int, dict[tuple[int, ...], int]]] = [
            (length, {}) for length in range(settings.max_ngram, settings.min_ngram - 1, -1)
        ]
        self._num_indexed = 0  # tokens that are a known successor of all n-grams before them
        self._max_num_tokens = settings.max_draft_tokens
        self._draft: list[int] = []  # the last one, whose fate is looked at before the next
        self._draft_end = 0  # tokens that were known then

    def append(self, token_id: int) -> None:
        """Take note of a token that was sampled."""
        self._token_ids.append(token_id)

    def draft(self, max_num_tokens: int) -> list[int]:
        """Guess up to ``max_num_tokens`` next tokens; none at all when the last tokens are new."""
        self._learn_from_last_draft()
        self._index()
        self._draft, self._draft_end = self._look_up(min(max_num_tokens, self._max_num_tokens)), len(self._token_ids)
        return self._draft

    def _learn_from_last_draft(self) -> None:
        if not self._draft:
            return
        num_true = 0
        for guessed, token_id in zip(self._draft, self._token_ids[self._draft_end :], strict=False):
            if guessed != token_id:
                break
            num_true += 1
        self._max_num_tokens = 2 * num_true + 1

    def _look_up(self, max_num_tokens: int) -> list[int]:
        token_ids, end = self._token_ids, len(self._token_ids)
        for length, places in self._places_by_length:
            place = places.get(tuple(token_ids[-length:]))
            if place is not None:
                draft = token_ids[place : place + max_num_tokens]
                while len(draft) < max_num_tokens:  # the copy has reached its own beginning
                    draft.append(draft[len(draft) - (end - place)])
                return draft
        return []

    def _index(self) -> None:
        """Enter the n-grams that have got a successor since the last time."""
        token_ids, start, end = self._token_ids, self._num_indexed, len(self._token_ids)
        for length, places in self._places_by_length:
            if end - start <= _FEW:
                for place in range(max(start, length), end):
                    places[tuple(token_ids[place - length : place])] = place
                continue
            first = max(start, length)
            tail = token_ids[first - length : end - 1]
            ngrams = zip(*(tail[offset:] for offset in range(length)), strict=False)
            places.update(zip(ngrams, range(first, end), strict=True))
        self._num_indexed = end
