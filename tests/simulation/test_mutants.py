"""Tests of the tests: each known-bad change to a core must be caught by the simulation within a few worlds."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from services.common.errors import EngineError
from services.kv_cache.core import pool
from services.kv_cache.core.block import Block, BlockContent
from services.kv_cache.core.block_pool import BlockPool
from services.kv_cache.core.manager import KVCacheManager
from services.kv_cache.core.messages import Commit
from services.kv_cache.core.pool import Pool
from services.kv_cache.core.prefix_cache import PrefixCache
from services.kv_cache.core.prefix_hash import CacheDomain, sha256
from services.scheduler.core.kv_broker import KVBroker
from services.scheduler.core.kv_messages import Admit, KVMessage
from services.scheduler.core.lane import Lane
from services.scheduler.core.request import Request, RequestStatus
from tests.simulation.simulation import Simulation

MAX_SEEDS = 200
MAX_SHORT_HASH_SEEDS = 20  # as many as pass unchanged in test_simulation
Patch = Callable[[pytest.MonkeyPatch], None]


def leak_a_block(patch: pytest.MonkeyPatch) -> None:
    """A release forgets the last block of a long table."""
    release = BlockPool.release

    def mutant(self: BlockPool, blocks: Sequence[Block]) -> None:
        release(self, blocks[:-1] if len(blocks) > 2 else blocks)

    patch.setattr(BlockPool, "release", mutant)


def skip_a_decrement(patch: pytest.MonkeyPatch) -> None:
    """A release leaves shared blocks alone."""
    release = BlockPool.release

    def mutant(self: BlockPool, blocks: Sequence[Block]) -> None:
        release(self, [block for block in blocks if block.ref_count == 1])

    patch.setattr(BlockPool, "release", mutant)


def double_a_token_after_preemption(patch: pytest.MonkeyPatch) -> None:
    """A preempted request reports its last token again."""
    leave = KVBroker.leave

    def mutant(self: KVBroker, request: Request, status: RequestStatus) -> None:
        leave(self, request, status)
        if status is RequestStatus.PREEMPTED and request.num_reported_tokens > request.num_prompt_tokens:
            request.num_reported_tokens -= 1

    patch.setattr(KVBroker, "leave", mutant)


def reuse_the_handle_after_preemption(patch: pytest.MonkeyPatch) -> None:
    """A request keeps its handle for life, so rows in flight from before a preemption count after it."""
    ask_admission = KVBroker._ask_admission
    handle_by_arrival: dict[tuple[int, int], int] = {}

    def mutant(self: KVBroker, request: Request, lane: Lane) -> Admit:
        next_handle = self._next_handle
        self._next_handle = handle_by_arrival.setdefault((id(self), request.arrival), next_handle)
        admit = ask_admission(self, request, lane)
        self._next_handle = next_handle + 1
        return admit

    patch.setattr(KVBroker, "_ask_admission", mutant)


def commit_what_is_only_planned(patch: pytest.MonkeyPatch) -> None:
    """A commit does not wait for the result of the step, which may turn out to have failed."""
    take_message = KVBroker.take_message
    commit_if_due = KVBroker._commit_if_due

    def mutant_take_message(self: KVBroker) -> KVMessage | None:
        for lane in self._lane_by_worker.values():
            self._uncommitted.update(dict.fromkeys(lane.running.values()))
        return take_message(self)

    def mutant_commit(self: KVBroker, request: Request) -> None:
        num_computed_tokens = request.num_computed_tokens
        request.num_computed_tokens = min(request.num_planned_tokens, len(request.token_ids))
        commit_if_due(self, request)
        request.num_computed_tokens = num_computed_tokens

    patch.setattr(KVBroker, "take_message", mutant_take_message)
    patch.setattr(KVBroker, "_commit_if_due", mutant_commit)


def commit_what_is_not_planned(patch: pytest.MonkeyPatch) -> None:
    """A commit names every known position."""
    commit_if_due = KVBroker._commit_if_due

    def mutant(self: KVBroker, request: Request) -> None:
        num_computed_tokens = request.num_computed_tokens
        request.num_computed_tokens = min(request.num_slots, len(request.token_ids))
        commit_if_due(self, request)
        request.num_computed_tokens = num_computed_tokens

    patch.setattr(KVBroker, "_commit_if_due", mutant)


def hit_all_known_tokens(patch: pytest.MonkeyPatch) -> None:
    """A prefix hit may cover the last known token too."""
    match = PrefixCache.match

    def mutant(self: PrefixCache, domain: object, token_ids: Sequence[int], max_blocks: int) -> list[Block]:
        return match(self, domain, token_ids, len(token_ids) // self._block_size)  # type: ignore[arg-type]

    patch.setattr(PrefixCache, "match", mutant)


def evict_without_parting(patch: pytest.MonkeyPatch) -> None:
    """A block that is handed out again stays findable under its old content."""

    def mutant(self: PrefixCache, block: Block) -> None:
        pass

    patch.setattr(PrefixCache, "evict", mutant)


def forget_to_tell_the_worker(patch: pytest.MonkeyPatch) -> None:
    """A worker is not told of requests that were preempted."""
    leave = KVBroker.leave

    def mutant(self: KVBroker, request: Request, status: RequestStatus) -> None:
        request.is_known_to_worker &= status is RequestStatus.FINISHED
        leave(self, request, status)

    patch.setattr(KVBroker, "leave", mutant)


def share_across_scopes(patch: pytest.MonkeyPatch) -> None:
    """Tenants that must not share find each other's prefixes."""

    def mutant(model: str, weight_version: str, adapter: str, cache_scope: str) -> CacheDomain:
        return CacheDomain(model, weight_version, adapter, cache_scope="")

    patch.setattr(pool, "CacheDomain", mutant)


def keep_what_a_dead_worker_held(patch: pytest.MonkeyPatch) -> None:
    """A pool is taken to be the same whatever life of its worker it is opened for."""
    open_pool = KVCacheManager.open_pool
    patch.setattr(KVCacheManager, "open_pool", lambda self, spec: open_pool(self, replace(spec, worker_epoch=1)))


def find_what_was_in_flight(patch: pytest.MonkeyPatch) -> None:
    """When a session is lost, what its leases had blocks for is taken to be computed."""
    begin_anew = Pool.begin_anew

    def mutant(self: Pool, block_epoch: int) -> None:
        for handle, lease in self.lease_by_handle.items():
            num_tokens = min(len(lease.token_ids), len(lease.blocks) * self.spec.block_size)
            self.commit(Commit(handle, num_tokens, ()))
        begin_anew(self, block_epoch)

    patch.setattr(Pool, "begin_anew", mutant)


def is_caught(seed: int) -> bool:
    try:
        Simulation(seed).run()
    except (AssertionError, EngineError):
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutate",
    [
        leak_a_block,
        skip_a_decrement,
        double_a_token_after_preemption,
        reuse_the_handle_after_preemption,
        commit_what_is_only_planned,
        commit_what_is_not_planned,
        hit_all_known_tokens,
        evict_without_parting,
        forget_to_tell_the_worker,
        share_across_scopes,
        keep_what_a_dead_worker_held,
        find_what_was_in_flight,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_simulation_catches_mutant(mutate: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert any(is_caught(seed) for seed in range(MAX_SEEDS))


@pytest.mark.slow
def test_simulation_catches_unverified_prefix_hits_when_hashes_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(self: PrefixCache, parent: BlockContent, key: bytes, block_hash: bytes) -> BlockContent | None:
        return self._content_by_hash.get(block_hash)

    def is_caught_with_short_hash(seed: int) -> bool:
        try:
            Simulation(seed, prefix_hash=lambda preimage: sha256(preimage)[:1]).run()
        except (AssertionError, EngineError):
            return True
        return False

    monkeypatch.setattr(PrefixCache, "_find", mutant)
    assert any(is_caught_with_short_hash(seed) for seed in range(MAX_SHORT_HASH_SEEDS))
