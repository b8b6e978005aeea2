"""The worker's domain types of a step: what to compute (`BatchPlan`) and what came out (`StepResult`).

Owns: plain values only; the wire form is the servicer's. Guarantees: immutable; no torch, no protobuf.

A row of a plan computes the half-open range of positions ``[start, start + num_scheduled_tokens)``, where ``start`` is
what this worker has computed for the handle so far::

    position   0 ........ num_computed_tokens ........ start ........ start + num_scheduled_tokens
               | prefix hit: KV is present | earlier rows |  this row  |  token sampled from here is
                                                                          appended, if is_sampling

A row that may draft computes further positions, whose tokens are guessed, and samples after each of them too. Tokens
count up to the first that is not the one guessed for its place, so a step may append several.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NewType

Handle = NewType("Handle", int)
"""One admission of one request to one worker (uint64)."""

BlockId = NewType("BlockId", int)
"""Index of a block in this worker's pool; 0 is the null block, which no request holds."""

NULL_BLOCK = BlockId(0)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen from its logits.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_p: Keeps the smallest set of most probable tokens whose mass reaches this; 1 is off.
        top_k: Keeps this many most probable tokens; 0 is off.
        min_p: Keeps tokens at least this share as probable as the most probable; 0 is off.
        seed: uint64 key of the generator.
        sample_index: Which of a request's n samples; 0 for n = 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that this worker did not know, in full.

    Attributes:
        handle: Its name in later plans.
        request_id: The client's name for it, for logs.
        token_ids: Every token known: prompt, then outputs so far.
        num_prompt_tokens: How many of them are prompt; output position = index - num_prompt_tokens.
        sampling: How its tokens are chosen.
        block_ids: Its block table so far; the first ones hold the prefix hit.
        num_computed_tokens: Positions below this have their KV in those blocks already.
    """

    handle: Handle
    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: tuple[BlockId, ...]
    num_computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's share of a step.

    Attributes:
        handle: Which request.
        num_scheduled_tokens: How many positions to compute, at least 1.
        new_block_ids: Appended to its block table before the step.
        is_sampling: Whether the token after the row's last position is sampled.
        max_draft_tokens: Positions beyond that may be computed for guessed tokens; there are slots for them. Only
            with ``is_sampling``.
    """

    handle: Handle
    num_scheduled_tokens: int
    new_block_ids: tuple[BlockId, ...] = ()
    is_sampling: bool = False
    max_draft_tokens: int = 0


class CopyDirection(Enum):
    """Which way a block's bytes go."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Bytes to be copied between a block of the device and a slot of the host tier.

    Attributes:
        direction: Which of the two is written.
        block_id: The block.
        host_slot: The slot, counted from 0.
    """

    direction: CopyDirection
    block_id: BlockId
    host_slot: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step of one worker. Executed strictly in the order of ``plan_id``.

    Attributes:
        plan_id: Increases by one per worker.
        new_requests: Admitted before the rows run.
        rows: What to compute, at most one row a handle.
        finished_handles: Forgotten before anything else happens.
        block_copies: Carried out in this order after that, before any row runs.
    """

    plan_id: int
    new_requests: tuple[NewRequest, ...] = ()
    rows: tuple[ScheduledRow, ...] = ()
    finished_handles: tuple[Handle, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that a sampling row ended with; the first of several, if drafts of it came true."""

    handle: Handle
    token_id: int


@dataclass(frozen=True, slots=True)
class RowDraft:
    """A row whose next ``num_tokens`` tokens were guessed; how many came true is told by how many were sampled."""

    handle: Handle
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RowError:
    """A row whose token could not be chosen (its logits hold NaN); its neighbours are unaffected."""

    handle: Handle
    message: str


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where a step's time went, in seconds of the device thread.

    Attributes:
        prepare_s: Until the forward pass began.
        forward_s: Of the forward pass.
        sample_s: After it.
        engine_cpu_s: CPU time, as opposed to the others, that the device thread spent inside the native engine; 0: it
            was not measured.
    """

    prepare_s: float
    forward_s: float
    sample_s: float
    engine_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced.

    Attributes:
        plan_id: Of the plan.
        sampled: The tokens in row order: of a sampling row that succeeded one, and one more for each draft that came
            true.
        timings: Where the time went.
        row_errors: One entry per sampling row that failed; such a request cannot go on after what it has in
            ``sampled``.
        drafts: One entry per row that drafted.
    """

    plan_id: int
    sampled: tuple[SampledToken, ...]
    timings: StepTimings
    row_errors: tuple[RowError, ...] = ()
    drafts: tuple[RowDraft, ...] = ()
