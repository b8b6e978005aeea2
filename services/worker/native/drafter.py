"""The native worker's drafts: a history of tokens for each request, guesses from it, and which of them came true.

Owns the histories. Guarantees: what counts is exactly what would have been sampled without drafts. The engine samples
after every drafted token as if it were the true one; while it is, the next sample is the true next token too, since a
sample is a pure function of the tokens before it, the seed and the output position. The first sample that is not the
drafted token is the last that counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.drafting import DraftSettings, TokenHistory
from services.worker.native.request_columns import Int32s
from services.worker.native.step_arrays import Drafts, PlannedRows
from services.worker.plan import BatchPlan, Handle, SampledToken


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which of a step's samples count.

    Attributes:
        kept: Their indices, ascending.
        num_tokens: ``[num_sampling_rows]``: how many each row has, at least 1.
    """

    kept: npt.NDArray[np.intp]
    num_tokens: Int32s

    def last_tokens(self, sampled: Int32s) -> Int32s:
        """Return the last token that counts of each sampling row."""
        last: Int32s = sampled[self.kept[np.cumsum(self.num_tokens) - 1]]
        return last


def verify(drafts: Drafts, sampled: Int32s) -> Verdict:
    """Compare drafts with what was sampled. Pure.

    Args:
        drafts: Of each sampling row.
        sampled: For each row the token after its last planned position, then the one after each drafted token.
    """
    token_ids = sampled.tolist()
    kept: list[int] = []
    num_tokens: list[int] = []
    first = 0
    for draft in drafts:
        end = first + 1
        for guessed in draft:
            if token_ids[end - 1] != guessed:
                break
            end += 1
        kept += range(first, end)
        num_tokens.append(end - first)
        first += len(draft) + 1
    return Verdict(np.array(kept, dtype=np.intp), np.array(num_tokens, dtype=np.int32))


class Drafter:
    """Histories of the requests that the worker knows.

    Args:
        settings: What is drafted.
    """

    def __init__(self, settings: DraftSettings) -> None:
        self._settings = settings
        self._history_by_handle: dict[Handle, TokenHistory] = {}

    def __len__(self) -> int:
        return len(self._history_by_handle)

    def clear(self) -> None:
        """Forget every request."""
        self._history_by_handle.clear()

    def take(self, plan: BatchPlan) -> None:
        """Forget what finished and learn what is new, of a plan that was proved executable."""
        for handle in plan.finished_handles:
            self._history_by_handle.pop(handle, None)
        for request in plan.new_requests:
            self._history_by_handle[request.handle] = TokenHistory(request.token_ids, self._settings)

    def draft(self, rows: PlannedRows) -> Drafts | None:
        """Guess what follows each sampling row; None when nothing is guessed."""
        if rows.max_drafts is None:
            return None
        max_drafts = np.minimum(rows.max_drafts[rows.is_sampling], self._settings.max_draft_tokens).tolist()
        drafts: list[Sequence[int]] = [
            self._history_by_handle[handle].draft(max_num_tokens) if max_num_tokens else ()
            for handle, max_num_tokens in zip(rows.sampling_handles, max_drafts, strict=True)
        ]
        return drafts if any(drafts) else None

    def note_sampled(self, tokens: Iterable[SampledToken]) -> None:
        """Take note of the tokens of a step."""
        for token in tokens:
            self._history_by_handle[token.handle].append(token.token_id)
