"""What a step computes, and what comes out of it: the contract with a worker, in the scheduler's own words.

A worker executes its plans strictly in order. A plan is a difference to what the worker knows: requests it has not met
come in full, known ones by handle. A row computes the positions ``[start, start + num_scheduled_tokens)`` of its
request, ``start`` being what that worker has computed (or been told to be computed) for the handle so far. With
run-ahead, plan k+1 is sent before result k is back; its decode rows take the token that plan k samples, which only
the worker knows by then.

So only the worker can guess what comes after that token. A row grants it positions for guesses; it samples after each,
and as many tokens count as there are guesses that came true, plus one.
"""

from dataclasses import dataclass
from typing import NamedTuple

from services.scheduler.core.kv_messages import BlockCopy

NOT_A_NUMBER = "the model's output was not a number; change the prompt or report this"
"""Why a request of ``StepResult.failed_handles`` ends."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw a token. Randomness is a function of ``(seed, sample_index, output position)`` and nothing else.

    ``temperature`` 0 is greedy; ``top_p`` 1, ``top_k`` 0 and ``min_p`` 0 are off. ``seed`` is a uint64.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class NewRequest:
    """Everything a worker needs to begin with a request.

    ``token_ids`` are all known tokens, prompt and outputs so far; positions below ``num_computed_tokens`` hold KV
    already. ``block_epoch`` names the opening of the pool that ``block_ids`` belong to.
    """

    handle: int
    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: tuple[int, ...]
    num_computed_tokens: int
    block_epoch: int


class ScheduledRow(NamedTuple):
    """One request's share of a step.

    ``new_block_ids`` are appended to the block table before the step. ``is_sampling``: the token after the row's last
    position is sampled, appended to the worker's own token list, and reported. ``max_draft_tokens``: positions beyond
    that the worker may compute for guessed tokens; they have slots. A named tuple, not a dataclass: one is made for
    every token, and it takes a third of the time.
    """

    handle: int
    num_scheduled_tokens: int
    new_block_ids: tuple[int, ...]
    is_sampling: bool
    max_draft_tokens: int = 0


class BatchPlan(NamedTuple):
    """One step of one worker.

    Applied in this order: forget ``finished_handles``, do ``block_copies``, learn ``new_requests``, run ``rows``.
    ``plan_id`` increases by one from plan to plan of a worker, also over its restarts. A named tuple, as rows are.
    """

    plan_id: int
    worker: str
    new_requests: tuple[NewRequest, ...]
    rows: tuple[ScheduledRow, ...]
    finished_handles: tuple[int, ...]
    block_copies: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out of the plan ``plan_id``.

    ``sampled`` holds ``(handle, token_id)`` for each sampling row, and once more for each guess that came true, in
    order; a row whose logits were no numbers is in ``failed_handles``, with whatever came true before. ``drafts`` holds
    ``(handle, num_tokens)`` for each row whose tokens were guessed. ``device_time_us`` is how long the device was busy;
    0 when it was not measured.
    """

    plan_id: int
    sampled: tuple[tuple[int, int], ...]
    failed_handles: tuple[int, ...] = ()
    device_time_us: int = 0
    drafts: tuple[tuple[int, int], ...] = ()
