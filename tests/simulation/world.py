"""The sizes and the traffic of one simulated world, drawn so that trouble is likely."""

import random
from dataclasses import dataclass, replace
from typing import get_args

from services.scheduler.core import (
    PolicyName,
    PolicySettings,
    PriorityClass,
    SamplingParams,
    SchedulerLimits,
    Submission,
    WorkerInfo,
)
from tests.simulation.fake_worker import VOCABULARY_SIZE

MODEL = "fake-model"
BACKLOG_RATIO = 0.2
QUOTAS_RATIO = 0.3


@dataclass(frozen=True)
class World:
    """Few blocks, few places, small budgets; workers that guess up to ``max_draft_tokens``.

    A backlog world has many small requests of tenants that differ in size, so that shares and turns matter. Any other
    has few large ones, so that blocks are short; in some of those, tenants have quotas.

    ``num_host_blocks`` is the size of the host tier, ``fault_ratio`` the chance that a moment brings a fault,
    ``spoil_ratio`` that a step has a row without numbers, ``arrival_ratio`` that a moment may bring a request.
    """

    is_backlog: bool
    limits: SchedulerLimits
    policy: PolicySettings
    tenants: tuple[str, ...]
    has_one_model_name: bool
    num_workers: int
    num_blocks: int
    num_host_blocks: int
    block_size: int
    max_model_len: int
    max_prompt_tokens: int
    max_output_tokens: int
    num_requests: int
    arrival_ratio: float
    fault_ratio: float
    spoil_ratio: float
    max_draft_tokens: int = 0
    has_quotas: bool = False

    @classmethod
    def draw(cls, rng: random.Random, seed: int) -> "World":
        """Draw the world of a seed."""
        world = cls._draw_backlog(rng) if rng.random() < BACKLOG_RATIO else cls._draw_shortage(rng)
        quotas_rng = random.Random(f"quotas of {seed}")
        has_quotas = not world.is_backlog and quotas_rng.random() < QUOTAS_RATIO
        # Numbers of its own, so that worlds without guesses are what they were before workers could guess.
        max_draft_tokens = random.Random(f"guesses of {seed}").choice([0, 0, 1, 4])
        world = replace(world, max_draft_tokens=max_draft_tokens)
        return world._with_quotas(quotas_rng) if has_quotas else world

    @classmethod
    def _draw_shortage(cls, rng: random.Random) -> "World":
        max_num_requests = rng.randint(1, 6)
        num_blocks, block_size = rng.randint(8, 24), rng.choice([1, 2, 4, 4, 16])
        max_model_len = rng.choice([40, 64])
        num_tokens = min(max_model_len, (num_blocks - 1) * block_size + 1)
        return cls(
            is_backlog=False,
            limits=SchedulerLimits(
                max_num_batched_tokens=max_num_requests + rng.choice([0, 1, 5, 40]),
                max_num_requests=max_num_requests,
                max_waiting_requests=rng.choice([4, 100]),
                run_ahead_depth=rng.choice([1, 2, 2, 3]),
                credit_tokens=rng.choice([1, 2, 8]),
                long_prefill_token_threshold=rng.choice([0, 0, 3]),
                batch_wait_ms=rng.choice([0, 0, 0, 20]),
                target_itl_ms=rng.choice([0, 0, 0, 3]),
            ),
            policy=_draw_policy(rng, rng.choice(get_args(PolicyName))),
            tenants=("tenant-0", "tenant-1", "tenant-2")[: rng.randint(1, 3)],
            has_one_model_name=rng.random() < 0.5,
            num_workers=rng.choice([1, 1, 2, 3]),
            num_blocks=num_blocks,
            num_host_blocks=rng.choice([0, 1, 4, num_blocks, 4 * num_blocks]),
            block_size=block_size,
            max_model_len=max_model_len,
            max_prompt_tokens=num_tokens,
            max_output_tokens=max(1, num_tokens // 2),
            num_requests=rng.randint(3, 16),
            arrival_ratio=0.3,
            fault_ratio=rng.choice([0.0, 0.0, 0.02, 0.1]),
            spoil_ratio=rng.choice([0.0, 0.0, 0.1, 0.3]),
        )

    def _with_quotas(self, rng: random.Random) -> "World":
        """Let several tenants contend for the blocks of, mostly, one worker."""
        max_num_requests = rng.choice([1, 2, 3, 3, 3, 6])
        max_num_batched_tokens = max(self.limits.max_num_batched_tokens, max_num_requests)
        return replace(
            self,
            has_quotas=True,
            limits=replace(
                self.limits,
                max_num_requests=max_num_requests,
                max_num_batched_tokens=max_num_batched_tokens,
                target_itl_ms=rng.choice([0, 0, 0, 3]),
            ),
            tenants=("tenant-0", "tenant-1", "tenant-2")[: rng.choice([2, 3])],
            num_workers=rng.choice([1, 1, 1, 1, 2]),
            num_blocks=rng.randint(8, 16),
            block_size=rng.choice([1, 2, 4]),
            num_requests=rng.randint(10, 30),
            arrival_ratio=rng.choice([0.5, 1.0]),
        )

    @classmethod
    def _draw_backlog(cls, rng: random.Random) -> "World":
        max_num_requests = rng.randint(1, 2)
        return cls(
            is_backlog=True,
            limits=SchedulerLimits(
                max_num_batched_tokens=16,
                max_num_requests=max_num_requests,
                run_ahead_depth=rng.choice([1, 2]),
                credit_tokens=2,
            ),
            policy=_draw_policy(rng, rng.choice(["fair", "fair", "priority", "composed"])),
            tenants=("tenant-0", "tenant-1"),
            has_one_model_name=True,
            num_workers=1,
            num_blocks=rng.randint(8, 16),
            num_host_blocks=rng.choice([0, 4]),
            block_size=4,
            max_model_len=64,
            max_prompt_tokens=6,
            max_output_tokens=6,
            num_requests=rng.randint(30, 50),
            arrival_ratio=rng.choice([0.5, 1.0]),
            fault_ratio=0.0,
            spoil_ratio=0.0,
        )

    def worker_info(self, name: str, epoch: int) -> WorkerInfo:
        """Build the facts of a worker; all workers are alike."""
        return WorkerInfo(
            name,
            epoch,
            self.num_blocks,
            self.block_size,
            self.max_model_len,
            MODEL,
            "v1",
            self.num_host_blocks,
            self.max_draft_tokens,
        )

    @property
    def has_shares(self) -> bool:
        """Whether the policy shares between tenants."""
        return self.policy.policy in ("fair", "composed")

    def fits(self, submission: Submission) -> bool:
        """Tell whether a request could run alone on a worker."""
        num_prompt_tokens = len(submission.prompt_token_ids)
        num_tokens = min(num_prompt_tokens + submission.max_tokens, self.max_model_len)
        return num_prompt_tokens < self.max_model_len and num_tokens - 1 <= (self.num_blocks - 1) * self.block_size


def _draw_policy(rng: random.Random, name: PolicyName) -> PolicySettings:
    weights = rng.choice([(), (), (("tenant-0", 3.0),)])
    return PolicySettings(name, ageing_ms=rng.choice([20, 100, 10_000]), tenant_weights=weights)


class Traffic:
    """Draws submissions of several tenants and classes, whose prompts often continue each other within two scopes."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._conversations: list[tuple[int, ...]] = [()]
        self._num_drawn = 0

    def draw(self, request_id: str, now_ms: int) -> Submission:
        """Draw a submission; in a world of shortage, about one in fifty does not fit."""
        rng = self._rng
        self._num_drawn += 1
        tenant, prompt, max_tokens = self._draw_small() if self._world.is_backlog else self._draw_large()
        has_deadline = not self._world.is_backlog and rng.random() < 0.1
        return Submission(
            request_id=request_id,
            gateway=f"gateway-{rng.randrange(2)}",
            tenant=tenant,
            cache_scope=rng.choice(["scope-a", "scope-a", "scope-b"]),
            model=MODEL if self._world.has_one_model_name else rng.choice([MODEL, ""]),
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, 3]),
            eos_token_ids=rng.choice([(), (7,)]),
            stop_token_ids=rng.choice([(), (11, 12)]),
            sampling=SamplingParams(seed=rng.randrange(3)),
            priority=rng.choice(list(PriorityClass)),
            deadline_ms=now_ms + rng.randint(1, 500) if has_deadline else None,
        )

    def learn(self, token_ids: tuple[int, ...]) -> None:
        """Let later prompts begin as ``token_ids`` do, as the next turn of a conversation does."""
        if not self._world.is_backlog:
            self._conversations.append(token_ids)

    def _draw_large(self) -> tuple[str, tuple[int, ...], int]:
        rng = self._rng
        num_tokens = self._world.max_prompt_tokens
        if rng.random() < 0.02:
            num_tokens *= 3
        max_tokens = rng.randint(1, max(1, num_tokens // 2))
        return rng.choice(self._world.tenants), self._draw_prompt(max(1, num_tokens - max_tokens)), max_tokens

    def _draw_small(self) -> tuple[str, tuple[int, ...], int]:
        """Draw for one tenant that is there from the beginning, and for one that comes later and asks for more."""
        rng = self._rng
        is_late = self._num_drawn > self._world.num_requests // 3 and rng.random() < 0.5
        max_prompt, max_output = (self._world.max_prompt_tokens, self._world.max_output_tokens) if is_late else (3, 2)
        prompt = tuple(rng.randrange(VOCABULARY_SIZE) for _ in range(rng.randint(1, max_prompt)))
        return self._world.tenants[is_late], prompt, rng.randint(1, max_output)

    def _draw_prompt(self, max_len: int) -> tuple[int, ...]:
        rng = self._rng
        prefix = rng.choice(self._conversations)[: rng.randint(0, max_len)]
        suffix = [rng.randrange(VOCABULARY_SIZE) for _ in range(rng.randint(0, max_len - len(prefix)))]
        return (*prefix, *suffix) or (rng.randrange(VOCABULARY_SIZE),)
