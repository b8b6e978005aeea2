"""The sizes and the traffic of one simulated world, drawn so that trouble is likely."""

import random
from dataclasses import dataclass

from services.scheduler.core import PriorityClass, SamplingParams, SchedulerLimits, Submission, WorkerInfo
from tests.simulation.fake_worker import VOCABULARY_SIZE

MODEL = "fake-model"


@dataclass(frozen=True)
class World:
    """Few blocks, few places, small budgets.

    ``fault_ratio`` is the chance that a moment brings a fault, ``spoil_ratio`` that a step has a row without numbers.
    """

    limits: SchedulerLimits
    num_workers: int
    num_blocks: int
    block_size: int
    max_model_len: int
    num_requests: int
    fault_ratio: float
    spoil_ratio: float

    @classmethod
    def draw(cls, rng: random.Random) -> "World":
        """Draw a world."""
        max_num_requests = rng.randint(1, 6)
        return cls(
            limits=SchedulerLimits(
                max_num_batched_tokens=max_num_requests + rng.choice([0, 1, 5, 40]),
                max_num_requests=max_num_requests,
                max_waiting_requests=rng.choice([4, 100]),
                run_ahead_depth=rng.choice([1, 2, 2, 3]),
                credit_tokens=rng.choice([1, 2, 8]),
            ),
            num_workers=rng.choice([1, 1, 2, 3]),
            num_blocks=rng.randint(8, 24),
            block_size=rng.choice([1, 2, 4, 4, 16]),
            max_model_len=rng.choice([40, 64]),
            num_requests=rng.randint(3, 16),
            fault_ratio=rng.choice([0.0, 0.0, 0.02, 0.1]),
            spoil_ratio=rng.choice([0.0, 0.0, 0.1, 0.3]),
        )

    def worker_info(self, name: str, epoch: int) -> WorkerInfo:
        """Build the facts of a worker; all workers are alike."""
        return WorkerInfo(name, epoch, self.num_blocks, self.block_size, self.max_model_len, MODEL, "v1")

    def fits(self, submission: Submission) -> bool:
        """Tell whether a request could run alone on a worker."""
        num_prompt_tokens = len(submission.prompt_token_ids)
        num_tokens = min(num_prompt_tokens + submission.max_tokens, self.max_model_len)
        return num_prompt_tokens < self.max_model_len and num_tokens - 1 <= (self.num_blocks - 1) * self.block_size


class Traffic:
    """Draws submissions whose prompts often continue each other, across two cache scopes."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._conversations: list[tuple[int, ...]] = [()]

    def draw(self, request_id: str, now_ms: int) -> Submission:
        """Draw a submission; about one in fifty does not fit the world."""
        rng = self._rng
        num_slots = (self._world.num_blocks - 1) * self._world.block_size
        num_tokens = min(self._world.max_model_len, num_slots + 1)
        if rng.random() < 0.02:
            num_tokens *= 3
        max_tokens = rng.randint(1, max(1, num_tokens // 2))
        prompt = self._draw_prompt(max(1, num_tokens - max_tokens))
        return Submission(
            request_id=request_id,
            gateway=f"gateway-{rng.randrange(2)}",
            tenant="tenant",
            cache_scope=rng.choice(["scope-a", "scope-a", "scope-b"]),
            model=rng.choice([MODEL, ""]),
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, 3]),
            eos_token_ids=rng.choice([(), (7,)]),
            stop_token_ids=rng.choice([(), (11, 12)]),
            sampling=SamplingParams(seed=rng.randrange(3)),
            priority=PriorityClass.NORMAL,
            deadline_ms=now_ms + rng.randint(1, 500) if rng.random() < 0.1 else None,
        )

    def _draw_prompt(self, max_len: int) -> tuple[int, ...]:
        rng = self._rng
        prefix = rng.choice(self._conversations)[: rng.randint(0, max_len)]
        suffix = [rng.randrange(VOCABULARY_SIZE) for _ in range(rng.randint(0, max_len - len(prefix)))]
        return (*prefix, *suffix) or (rng.randrange(VOCABULARY_SIZE),)

    def learn(self, token_ids: tuple[int, ...]) -> None:
        """Let later prompts begin as ``token_ids`` do, as the next turn of a conversation does."""
        self._conversations.append(token_ids)
