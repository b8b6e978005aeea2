"""A worker without tensors, whose next token depends on every KV entry that a real one would attend to.

The KV entry of position p is a hash of ``(p, token, entry of p - 1)``, as a real model's deeper layers depend on the
whole prefix. It is written to the slot that the block table names, and read back from there by every later position.
A wrong block, a stale block, a row of another request or a missing position therefore changes the next token, or hits
a poisoned slot: a block is poisoned when a request takes it up, unless the prefix cache vouches for it. Host memory
holds entries too; a copy moves them, so that whoever relies on what was moved away is caught as well.

Where it may guess tokens, it guesses any number of them, often rightly and often up to a wrong one; the entries of
wrong ones stay in their slots, so that whoever takes them for computed is caught.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.scheduler.core import (
    BatchPlan,
    BlockCopy,
    CopyDirection,
    NewRequest,
    ScheduledRow,
    StepResult,
    WorkerInfo,
)

VOCABULARY_SIZE = 50
POISON = None
SPOILT = -1


class WorkerError(AssertionError):
    """A plan that a worker could not have executed."""


def kv_entry(position: int, token_id: int, previous_entry: int) -> int:
    """KV of one position, given that of the position before (0 for none). Pure."""
    return hash((position, token_id, previous_entry))


def next_token(entries: list[int], seed: int, output_position: int) -> int:
    """Sample the token after ``entries``, as a function of them, the seed and the output position. Pure."""
    return hash((tuple(entries), seed, output_position)) % VOCABULARY_SIZE


def reference_outputs(
    known_token_ids: Sequence[int], num_tokens: int, seed: int, first_output_position: int = 0
) -> list[int]:
    """Compute the next outputs of an undisturbed request, without blocks, batches or steps. Pure."""
    token_ids = list(known_token_ids)
    entries: list[int] = []
    for output_position in range(first_output_position, first_output_position + num_tokens):
        for position in range(len(entries), len(token_ids)):
            entries.append(kv_entry(position, token_ids[position], entries[-1] if entries else 0))
        token_ids.append(next_token(entries, seed, output_position))
    return token_ids[len(known_token_ids) :]


@dataclass
class _State:
    request: NewRequest
    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int


class FakeWorker:
    """Executes plans in order and checks each as a real worker would.

    Args:
        info: Its facts; ``num_blocks * block_size`` slots are kept.
        scope_of: Cache scope of a request id; the content of a block must never be used in another scope.
    """

    def __init__(self, info: WorkerInfo, scope_of: Callable[[str], str] = lambda request_id: "") -> None:
        self.info = info
        self._scope_of = scope_of
        self._scope_by_block: dict[int, str] = {}
        self._slots: list[int | None] = [POISON] * (info.num_blocks * info.block_size)
        self._host_blocks: dict[int, tuple[str, list[int | None]]] = {}
        self._state_by_handle: dict[int, _State] = {}
        self._last_plan_id: int | None = None

    @property
    def num_known_requests(self) -> int:
        """Requests that it was not told to forget yet."""
        return len(self._state_by_handle)

    @property
    def known_handles(self) -> frozenset[int]:
        """Those requests."""
        return frozenset(self._state_by_handle)

    def begin_session(self) -> None:
        """Serve another stream of plans: requests are forgotten, whatever memory holds stays."""
        self._state_by_handle.clear()
        self._last_plan_id = None

    def request_id_of(self, handle: int) -> str:
        """Return the request that a known handle belongs to."""
        return self._state_by_handle[handle].request.request_id

    def spoil(self, handle: int, num_positions: int) -> None:
        """Let the KV of the last positions of a known handle be no numbers: whoever uses it draws wrong tokens."""
        state = self._state_by_handle[handle]
        for position in range(state.num_computed_tokens - num_positions, state.num_computed_tokens):
            self._slots[self._slot(state, position)] = SPOILT

    def execute(self, plan: BatchPlan) -> StepResult:
        """Run a step.

        Raises:
            WorkerError: the plan is not executable: unknown handle, missing slot, poisoned KV, and so on.
        """
        self._check(self._last_plan_id is None or plan.plan_id == self._last_plan_id + 1, "plan ids ascend by one")
        self._last_plan_id = plan.plan_id
        for handle in plan.finished_handles:
            self._check(handle in self._state_by_handle, f"finished handle {handle} is known")
            del self._state_by_handle[handle]
        for copy in plan.block_copies:
            self._copy(copy)
        for request in plan.new_requests:
            self._learn(request)
        handles = [row.handle for row in plan.rows]
        self._check(len(set(handles)) == len(handles), "a request has at most one row in a plan")
        guesses = {row.handle: self._guess(row) for row in plan.rows if row.max_draft_tokens}
        sampled = [(row.handle, token) for row in plan.rows for token in self._run(row, guesses.get(row.handle, []))]
        drafts = tuple((handle, len(guess)) for handle, guess in guesses.items() if guess)
        return StepResult(plan.plan_id, tuple(sampled), drafts=drafts)

    def _copy(self, copy: BlockCopy) -> None:
        block_id, host_slot, block_size = copy.block_id, copy.host_slot, self.info.block_size
        self._check(0 < block_id < self.info.num_blocks, f"block {block_id} is usable")
        self._check(0 <= host_slot < self.info.num_host_blocks, f"host slot {host_slot} exists")
        slots = slice(block_id * block_size, (block_id + 1) * block_size)
        if copy.direction is CopyDirection.TO_HOST:
            self._check(block_id in self._scope_by_block, f"block {block_id} holds something when it is offloaded")
            self._check(POISON not in self._slots[slots], f"block {block_id} is full when it is offloaded")
            self._host_blocks[host_slot] = (self._scope_by_block.pop(block_id), self._slots[slots])
            self._slots[slots] = [POISON] * block_size
        else:
            self._check(host_slot in self._host_blocks, f"host slot {host_slot} holds something when it is restored")
            self._scope_by_block[block_id], self._slots[slots] = self._host_blocks.pop(host_slot)

    def _learn(self, request: NewRequest) -> None:
        self._check(request.handle not in self._state_by_handle, f"handle {request.handle} is new")
        num_cached_blocks = request.num_computed_tokens // self.info.block_size
        self._check(request.num_computed_tokens < len(request.token_ids), "a prefix hit leaves a token to compute")
        self._state_by_handle[request.handle] = _State(
            request, list(request.token_ids), list(request.block_ids), request.num_computed_tokens
        )
        scope = self._scope_of(request.request_id)
        for block_id in request.block_ids[:num_cached_blocks]:
            self._check(self._scope_by_block.get(block_id) == scope, f"hit in block {block_id} stays in its scope")
        self._poison(request.block_ids[num_cached_blocks:], scope)

    def _poison(self, block_ids: tuple[int, ...], scope: str) -> None:
        block_size = self.info.block_size
        for block_id in block_ids:
            self._check(0 < block_id < self.info.num_blocks, f"block {block_id} is usable")
            self._slots[block_id * block_size : (block_id + 1) * block_size] = [POISON] * block_size
            self._scope_by_block[block_id] = scope

    def _guess(self, row: ScheduledRow) -> list[int]:
        """Guess up to as many tokens as the row may draft; they are right up to any place, perhaps to the end."""
        self._check(row.handle in self._state_by_handle, f"row handle {row.handle} is known")
        self._check(0 < row.max_draft_tokens <= self.info.max_draft_tokens, "a row drafts what its worker can")
        self._check(row.is_sampling, "a row that drafts samples")
        state = self._state_by_handle[row.handle]
        luck = hash(tuple(state.token_ids))
        count = luck % (row.max_draft_tokens + 1)
        output_position = len(state.token_ids) - state.request.num_prompt_tokens
        guess = reference_outputs(state.token_ids, count, state.request.sampling.seed, output_position)
        first_wrong = luck // 64 % (2 * count + 1)
        return [(token + (place >= first_wrong)) % VOCABULARY_SIZE for place, token in enumerate(guess)]

    def _run(self, row: ScheduledRow, guess: list[int]) -> list[int]:
        """Compute a row and what was guessed to follow it; return the tokens that count."""
        self._check(row.handle in self._state_by_handle, f"row handle {row.handle} is known")
        state = self._state_by_handle[row.handle]
        state.block_ids += row.new_block_ids
        self._poison(row.new_block_ids, self._scope_of(state.request.request_id))
        start, end = state.num_computed_tokens, state.num_computed_tokens + row.num_scheduled_tokens
        self._check(start < end <= len(state.token_ids), "a row computes known tokens, at least one")
        self._check(row.is_sampling == (end == len(state.token_ids)), "a row samples iff it reaches the last token")
        self._check(end + row.max_draft_tokens <= len(state.block_ids) * self.info.block_size, "a row has slots")
        self._check(end + row.max_draft_tokens < self.info.max_model_len, "a row stays within the model's length")
        entries = [self._read(state, position) for position in range(start)]
        inputs = state.token_ids[start:end] + guess
        for position, token_id in enumerate(inputs, start):
            entry = kv_entry(position, token_id, entries[-1] if entries else 0)
            self._slots[self._slot(state, position)] = entry
            entries.append(entry)
        state.num_computed_tokens = end
        if not row.is_sampling:
            return []
        tokens: list[int] = []
        while len(tokens) <= len(guess) and tokens == guess[: len(tokens)]:
            output_position = len(state.token_ids) - state.request.num_prompt_tokens
            known = entries[: end + len(tokens)]
            tokens.append(next_token(known, state.request.sampling.seed, output_position))
            state.token_ids.append(tokens[-1])
        state.num_computed_tokens = end + len(tokens) - 1
        return tokens

    def _slot(self, state: _State, position: int) -> int:
        block_size = self.info.block_size
        return state.block_ids[position // block_size] * block_size + position % block_size

    def _read(self, state: _State, position: int) -> int:
        entry = self._slots[self._slot(state, position)]
        if entry is POISON:
            raise WorkerError(f"{state.request.request_id} reads position {position}, which nobody has written")
        return entry

    def _check(self, condition: bool, law: str) -> None:
        if not condition:
            raise WorkerError(f"broken: {law}")
