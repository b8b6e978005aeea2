"""One request among others on the native engine: its tokens, and the logits that each was chosen from.

The cores of scheduler and KV-cache manager decide, as they do when they serve. The request, of the lowest class, begins
first; neighbours of varied lengths come and go around it, so that there are always as many; and if the cell says so, a
vip takes its place and all its blocks in the middle of its answer. That all this happened is checked here, or a cell
would prove nothing.
"""

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

import numpy as np
import numpy.typing as npt

from services.scheduler.core import PriorityClass, SamplingParams
from services.worker.loaded_model import LoadedModel
from services.worker.native.runner import NativeRunner
from services.worker.plan import BatchPlan, BlockId, CopyDirection, Handle, NewRequest, StepResult
from tests.core_mesh import GREEDY, CoreMesh, Sizes
from tests.identity.conftest import varied_prompts

BLOCK_SIZE = 16
"""Small, so that so short requests have blocks to lose."""
TARGET_ID = "target"
NUM_OUTPUTS = 12
NUM_OUTPUTS_BEFORE = 5
"""Outputs after which it may be interrupted."""
PROMPTS = varied_prompts(49_152)
TARGET = PROMPTS[19]  # 90 tokens
INTRUDER = PROMPTS[18] + PROMPTS[16][:24]
TARGET_BLOCKS = 7
"""What the target needs to its end, and the intruder from its start."""
MAX_NEIGHBOURS = 32
NUM_NEIGHBOUR_OUTPUTS = 14
# By seat. None grows into another block with its outputs, so how many are free can be foretold. The first has two full
# blocks in common with the target.
NEIGHBOURS = [
    PROMPTS[10],
    PROMPTS[1],
    PROMPTS[6],
    PROMPTS[0],
    PROMPTS[14],
    PROMPTS[17][:1],
    PROMPTS[17][:2],
    PROMPTS[17],
]
NEIGHBOURS += [PROMPTS[15][seat : seat + 1 + seat % 2] for seat in range(len(NEIGHBOURS), MAX_NEIGHBOURS)]
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=77)


class Prefix(Enum):
    """What of the prompt is cached when the request begins."""

    COLD = "cold"
    HIT = "hit"


class Interruption(Enum):
    """What becomes of the request in the middle of its answer."""

    NONE = "none"
    SWAP = "swap"
    RECOMPUTE = "recompute"


class Choice(Enum):
    """How tokens are chosen."""

    GREEDY = "greedy"
    SEEDED = "seeded"


@dataclass(frozen=True, slots=True)
class Cell:
    """What goes on around the request, and how it comes to its tokens.

    Attributes:
        num_neighbours: Requests that run beside it, at most `MAX_NEIGHBOURS`; 0: it has every step for itself.
        chunk: Most tokens of a prompt in one step.
        prefix: Whether it finds its prompt's full blocks.
        interruption: Whether it is preempted, and how it comes back.
        choice: Of its tokens; neighbours are greedy and seeded in turn.
    """

    num_neighbours: int
    chunk: int
    prefix: Prefix
    interruption: Interruption
    choice: Choice

    def __str__(self) -> str:
        names = (self.prefix.value, self.interruption.value, self.choice.value)
        return "-".join((f"{self.num_neighbours}-neighbours", f"chunk-{self.chunk}", *names))


@dataclass(frozen=True, slots=True)
class Observed:
    """A request's tokens, and a digest of the logits that each was chosen from."""

    token_ids: list[int]
    logits: list[str]


@dataclass(slots=True)
class Life:
    """What one admission of the target came to.

    Attributes:
        request: As the worker was told.
        num_restored: Of the blocks that it began with, those brought back from host memory.
        longest_row: Most of its tokens in one step.
        most_beside: Most other rows in a step that sampled a token of it.
    """

    request: NewRequest
    num_restored: int
    longest_row: int = 0
    most_beside: int = 0


@dataclass
class Watch:
    """Stands between the cores and a runner, as a ``StepRunner``, and notes what becomes of the target."""

    runner: NativeRunner
    lives: list[Life] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    """By the number of tokens before the one that was chosen."""
    _num_computed: int = 0
    _restored: set[BlockId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.runner._observe_logits = self._note_logits

    @property
    def num_requests(self) -> int:
        return self.runner.num_requests

    @property
    def handles(self) -> tuple[Handle, ...]:
        return self.runner.handles

    def reset(self) -> None:
        self.runner.reset()

    def execute(self, plan: BatchPlan) -> StepResult:
        for copy in plan.block_copies:
            if copy.direction is CopyDirection.TO_DEVICE:
                self._restored.add(copy.block_id)
        for request in plan.new_requests:
            if request.request_id == TARGET_ID:
                self.lives.append(Life(request, len(self._restored.intersection(request.block_ids))))
                self._num_computed = request.num_computed_tokens
                self._restored.clear()
        for row in plan.rows:
            if self.lives and row.handle == self.lives[-1].request.handle:
                life = self.lives[-1]
                self._num_computed += row.num_scheduled_tokens
                life.longest_row = max(life.longest_row, row.num_scheduled_tokens)
                if row.is_sampling:
                    life.most_beside = max(life.most_beside, len(plan.rows) - 1)
        return self.runner.execute(plan)

    def _note_logits(self, handles: list[Handle], logits: npt.NDArray[np.float32]) -> None:
        for handle, row in zip(handles, logits, strict=True):
            if self.lives and handle == self.lives[-1].request.handle:
                digest = hashlib.sha256(np.ascontiguousarray(row)).hexdigest()
                # A token that was in flight when its request was preempted is thrown away, and chosen once more.
                assert self.digests.setdefault(self._num_computed, digest) == digest


class Crowd:
    """So many neighbours at any time: who comes to an end is followed by another that asks for the same.

    Args:
        mesh: Where they run.
        num_seats: How many.
    """

    def __init__(self, mesh: CoreMesh, num_seats: int) -> None:
        self._mesh = mesh
        self._ids_by_seat: list[list[str]] = [[] for _ in range(num_seats)]
        self._numbers = count()

    def fill(self) -> None:
        """Submit a neighbour for each seat that nobody has."""
        for seat, ids in enumerate(self._ids_by_seat):
            if not ids or self._has_ended(ids[-1]):
                ids.append(f"neighbour-{next(self._numbers)}")
                params = SamplingParams(temperature=seat % 2, seed=seat)
                self._mesh.submit(ids[-1], NEIGHBOURS[seat], NUM_NEIGHBOUR_OUTPUTS, params)

    def is_settled(self) -> bool:
        """Whether all have begun to answer and none has ended: then no place and hardly a block is free."""
        return all(0 < len(self._mesh.outputs[ids[-1]]) < NUM_NEIGHBOUR_OUTPUTS for ids in self._ids_by_seat)

    def check(self) -> None:
        """Require that all who had the same seat got the same tokens."""
        for ids in self._ids_by_seat:
            outputs = {tuple(self._mesh.outputs[each]) for each in ids if self._has_ended(each)}
            assert len(outputs) <= 1, ids

    def _has_ended(self, request_id: str) -> bool:
        return len(self._mesh.outputs[request_id]) == NUM_NEIGHBOUR_OUTPUTS


def observe(loaded: LoadedModel, cell: Cell, block_size: int = BLOCK_SIZE) -> Observed:
    """Run a cell and require that it was what its name says; with blocks of another size nothing interrupts."""
    assert block_size == BLOCK_SIZE or cell.interruption is Interruption.NONE
    watch = Watch(loaded.runner)
    mesh = CoreMesh(watch, sizes_of(loaded, cell, block_size))
    if cell.prefix is Prefix.HIT:
        mesh.generate([TARGET], 1)
    mesh.submit(TARGET_ID, TARGET, NUM_OUTPUTS, SEEDED if cell.choice is Choice.SEEDED else GREEDY, PriorityClass.BATCH)
    crowd, outputs = Crowd(mesh, cell.num_neighbours), mesh.outputs[TARGET_ID]
    is_due = cell.interruption is not Interruption.NONE
    while len(outputs) < NUM_OUTPUTS:
        if watch.lives:
            crowd.fill()
        if is_due and len(outputs) >= NUM_OUTPUTS_BEFORE and crowd.is_settled():
            mesh.submit("intruder", INTRUDER, 1, priority=PriorityClass.VIP)
            is_due = False
        assert mesh.advance()
    mesh.check_invariants()
    crowd.check()
    check_lives(cell, watch.lives, block_size)
    return Observed(outputs, [watch.digests[len(TARGET) + index] for index in range(NUM_OUTPUTS)])


def sizes_of(loaded: LoadedModel, cell: Cell, block_size: int) -> Sizes:
    """One place for each; where the target is to be interrupted, no block more than are needed."""
    num_blocks, is_swap = loaded.num_blocks, cell.interruption is Interruption.SWAP
    if cell.interruption is not Interruption.NONE:
        lengths = [len(prompt) + NUM_NEIGHBOUR_OUTPUTS for prompt in NEIGHBOURS[: cell.num_neighbours]]
        num_blocks = 1 + TARGET_BLOCKS + sum(-(-length // block_size) for length in lengths)
    return Sizes(
        num_blocks=num_blocks,
        block_size=block_size,
        num_host_blocks=loaded.num_host_blocks if is_swap else 0,
        max_num_batched_tokens=max(cell.chunk, 64),
        max_num_requests=cell.num_neighbours + 1,
        chunk=cell.chunk,
    )


def check_lives(cell: Cell, lives: list[Life], block_size: int) -> None:
    """Require that the target lived as the cell says."""
    first, last = lives[0], lives[-1]
    num_hit = (len(TARGET) - 1) // block_size * block_size if cell.prefix is Prefix.HIT else 0
    assert first.request.num_computed_tokens == num_hit
    assert first.longest_row == min(cell.chunk, len(TARGET) - num_hit)
    assert {life.most_beside for life in lives} == {cell.num_neighbours}
    if cell.interruption is Interruption.NONE:
        assert len(lives) == 1
        return
    assert len(lives) > 1
    num_known = len(last.request.token_ids)
    assert num_known > len(TARGET)
    if cell.interruption is Interruption.SWAP:
        assert last.num_restored > 0
        assert last.request.num_computed_tokens == (num_known - 1) // block_size * block_size
    else:
        assert last.num_restored == 0
        assert last.longest_row > 1  # so it computed again
        assert last.request.num_computed_tokens < len(TARGET) // block_size * block_size
