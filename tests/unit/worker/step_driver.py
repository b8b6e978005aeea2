"""A minimal scheduler for tests of the worker: continuous batching with any chunk size and run-ahead depth.

It knows nothing of results when it plans, as with run-ahead: a request that reached its length gets ``depth - 1`` more
rows, whose tokens are dropped, before it is finished. Block tables are random permutations of the pool.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.worker.plan import BatchPlan, BlockId, Handle, NewRequest, SamplingParams, ScheduledRow, StepResult

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Tracked:
    """A request as the driver sees it."""

    handle: Handle
    prompt: tuple[int, ...]
    num_outputs: int
    sampling: SamplingParams
    num_planned: int = 0
    num_sampled: int = 0
    num_dead_rows: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    @property
    def num_known(self) -> int:
        return len(self.prompt) + self.num_sampled


class StepDriver:
    """Feeds plans to ``execute`` until every request has its tokens.

    Args:
        execute: Runs a plan; usually `ModelRunner.execute`.
        num_blocks: Of the pool, the null block included.
        block_size: Slots a block.
        chunk: Most prompt tokens of one row.
        depth: Plans made before the oldest one's result is looked at.
        seed: Of the block permutation and of random chunks.
        has_random_chunks: Draw each chunk from 1..chunk.
        has_prefix_cache: Keep full prompt blocks and reuse them for later prompts.
    """

    def __init__(
        self,
        execute: Callable[[BatchPlan], StepResult],
        *,
        num_blocks: int,
        block_size: int,
        chunk: int = 512,
        depth: int = 1,
        seed: int = 0,
        has_random_chunks: bool = False,
        has_prefix_cache: bool = False,
    ) -> None:
        self._execute = execute
        self._block_size = block_size
        self._chunk = chunk
        self._depth = depth
        self._random = random.Random(seed)
        self._has_random_chunks = has_random_chunks
        self._has_prefix_cache = has_prefix_cache
        self._free = [BlockId(block_id) for block_id in range(1, num_blocks)]
        self._random.shuffle(self._free)
        self._block_by_prefix: dict[tuple[int, ...], BlockId] = {}
        self._next_handle = 1
        self._next_plan_id = 1
        self.num_prefix_hit_tokens = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], num_outputs: int, sampling: Sequence[SamplingParams] | None = None
    ) -> list[list[int]]:
        """Run prompts together; return each one's output tokens."""
        requests = []
        for index, prompt in enumerate(prompts):
            params = sampling[index] if sampling else GREEDY
            requests.append(Tracked(Handle(self._next_handle), tuple(prompt), num_outputs, params))
            self._next_handle += 1
        request_by_handle = {request.handle: request for request in requests}
        in_flight: deque[BatchPlan] = deque()
        waiting, running = deque(requests), list[Tracked]()
        while True:
            plan = self._plan(waiting, running)
            if plan is not None:
                in_flight.append(plan)
            if not in_flight:
                break
            if len(in_flight) >= self._depth or plan is None:
                result = self._execute(in_flight.popleft())
                for token in result.sampled:
                    request_by_handle[token.handle].outputs.append(token.token_id)
        return [request.outputs[:num_outputs] for request in requests]

    def _plan(self, waiting: deque[Tracked], running: list[Tracked]) -> BatchPlan | None:
        budget = self._chunk
        rows, new_requests, finished = [], [], []
        for request in list(running):
            if request.num_sampled >= request.num_outputs:
                if request.num_dead_rows >= self._depth - 1:
                    running.remove(request)
                    finished.append(request.handle)
                    self._release(request)
                    continue
                request.num_dead_rows += 1
            budget -= self._add_row(request, budget, rows)
        while waiting and budget > 0:
            request = waiting.popleft()
            self._reuse_prefix(request)
            new_requests.append(self._new_request(request))
            budget -= self._add_row(request, budget, rows)
            running.append(request)
        if not rows and not finished:
            return None
        self._next_plan_id += 1
        return BatchPlan(self._next_plan_id, tuple(new_requests), tuple(rows), tuple(finished))

    def _new_request(self, request: Tracked) -> NewRequest:
        return NewRequest(
            handle=request.handle,
            request_id=f"r{request.handle}",
            token_ids=request.prompt,
            num_prompt_tokens=len(request.prompt),
            sampling=request.sampling,
            block_ids=tuple(request.blocks),
            num_computed_tokens=request.num_planned,
        )

    def _add_row(self, request: Tracked, budget: int, rows: list[ScheduledRow]) -> int:
        num_tokens = min(request.num_known - request.num_planned, budget)
        if self._has_random_chunks and num_tokens > 1:
            num_tokens = self._random.randint(1, num_tokens)
        if num_tokens < 1:
            return 0
        request.num_planned += num_tokens
        num_blocks = -(-request.num_planned // self._block_size)
        new_blocks = [self._free.pop() for _ in range(num_blocks - len(request.blocks))]
        request.blocks += new_blocks
        is_sampling = request.num_planned == request.num_known
        request.num_sampled += is_sampling
        rows.append(ScheduledRow(request.handle, num_tokens, tuple(new_blocks), is_sampling))
        return num_tokens

    def _reuse_prefix(self, request: Tracked) -> None:
        if not self._has_prefix_cache:
            return
        for end in range(self._block_size, len(request.prompt), self._block_size):
            block = self._block_by_prefix.get(request.prompt[:end])
            if block is None:
                return
            request.blocks.append(block)
            request.num_planned = end
            self.num_prefix_hit_tokens += self._block_size

    def _release(self, request: Tracked) -> None:
        """Give blocks back; safe with plans in flight, since the runner executes them before it reuses a block."""
        kept: set[BlockId] = set()
        if self._has_prefix_cache:
            for index in range(len(request.prompt) // self._block_size):
                prefix = request.prompt[: (index + 1) * self._block_size]
                self._block_by_prefix.setdefault(prefix, request.blocks[index])
            kept = set(self._block_by_prefix.values())
        self._free += [block for block in request.blocks if block not in kept]
        self._random.shuffle(self._free)
