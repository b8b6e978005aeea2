"""Events tell exactly what can be hit, and pools come back with their content for the same worker life only."""

from services.kv_cache.core import Admit, AdmitGranted, Commit, KVCacheManager, KVMessage, ManagerSettings, PoolSpec
from services.kv_cache.core.events import BlockRemoved, BlockStored, EventLog, PoolCleared
from services.kv_cache.core.figures import Histogram

POOL = "worker-0"
PROMPT = tuple(range(100, 110))


def spec(worker_epoch: int = 5, num_blocks: int = 5) -> PoolSpec:
    return PoolSpec(POOL, num_blocks, 4, "m", "v", worker_epoch)


def run_to_end(manager: KVCacheManager, handle: int, token_ids: tuple[int, ...]) -> int:
    """Admit, compute all tokens, release; return the hit in tokens."""
    grant = manager.admit(Admit(handle, POOL, "s", token_ids, len(token_ids)))
    assert isinstance(grant, AdmitGranted)
    manager.commit(Commit(handle, len(token_ids), ()))
    manager.release(handle)
    manager.check_invariants()
    return grant.num_cached_tokens


def make_manager(max_events: int = 100) -> KVCacheManager:
    manager = KVCacheManager(70, settings=ManagerSettings(max_events=max_events))
    manager.open_pool(spec())
    return manager


def hashes_after(manager: KVCacheManager, sequence: int, known: set[bytes]) -> set[bytes]:
    """What a reader knows who knew ``known`` at ``sequence``."""
    for event in manager.events.read(sequence, 1000) or ():
        match event:
            case BlockStored():
                known = known | {event.block_hash}
            case BlockRemoved():
                known = known - {event.block_hash}
            case PoolCleared():
                known = set()
    return known


def test_log_numbers_events_and_keeps_the_last_ones() -> None:
    log = EventLog(max_events=3)
    assert (log.first_sequence, log.next_sequence) == (1, 1)
    assert log.read(1, 10) == []
    events = [PoolCleared(str(number)) for number in range(1, 6)]
    for event in events:
        log.append(event)
    assert (log.first_sequence, log.next_sequence) == (3, 6)
    assert log.read(3, 10) == events[2:]
    assert log.read(4, 1) == [events[3]]
    assert log.read(6, 10) == []


def test_log_tells_a_reader_to_resync_when_events_are_dropped_or_were_never_numbered_so() -> None:
    log = EventLog(max_events=2)
    for number in range(3):
        log.append(PoolCleared(str(number)))
    assert log.read(1, 10) is None
    assert log.read(5, 10) is None


def test_commit_stores_each_full_block_below_its_parent() -> None:
    manager = make_manager()
    run_to_end(manager, 1, PROMPT)
    first, second = manager.events.read(1, 10) or ()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert second.parent_hash == first.block_hash
    assert manager.stored() == [first, second]


def test_second_block_of_the_same_tokens_is_no_event() -> None:
    manager = make_manager()
    for handle in (1, 2):
        manager.admit(Admit(handle, POOL, "s", PROMPT[:5], 5))
    for handle in (1, 2):
        manager.commit(Commit(handle, 5, ()))
    assert manager.events.next_sequence == 2


def test_reader_of_events_knows_what_a_snapshot_tells_after_evictions() -> None:
    manager = make_manager()
    known: set[bytes] = set()
    sequence = 1
    for handle in range(1, 20):
        run_to_end(manager, handle, (handle % 3, *PROMPT[: handle % 9]))
        known, sequence = hashes_after(manager, sequence, known), manager.events.next_sequence
        assert known == {stored.block_hash for stored in manager.stored()}
    assert known


def test_closing_a_pool_is_told_once() -> None:
    manager = make_manager()
    manager.close_pool(POOL)
    manager.close_pool(POOL)
    assert manager.events.read(1, 10) == [PoolCleared(POOL)]


def test_pool_keeps_what_it_caches_when_a_new_scheduler_opens_it_for_the_same_worker_life() -> None:
    manager = make_manager()
    run_to_end(manager, 1, PROMPT)
    manager.admit(Admit(2, POOL, "s", (1, 2), 2))
    manager.suspend_pools()
    assert manager.pools() == []
    assert manager.apply_batch(KVMessage(1, open_pools=(spec(),))).pool_epochs == ((POOL, 71),)
    assert manager.usage(POOL).num_leases == 0
    assert run_to_end(manager, 2, PROMPT) == 8


def test_pool_comes_back_empty_for_another_worker_life_or_an_unknown_one() -> None:
    for first, second in [(5, 6), (0, 0)]:
        manager = KVCacheManager(70)
        manager.open_pool(spec(first))
        run_to_end(manager, 1, PROMPT)
        manager.suspend_pools()
        manager.open_pool(spec(second))
        assert run_to_end(manager, 2, PROMPT) == 0


def test_suspended_pool_is_forgotten_when_the_next_scheduler_goes_without_opening_it() -> None:
    manager = make_manager()
    run_to_end(manager, 1, PROMPT)
    manager.suspend_pools()
    manager.suspend_pools()
    assert manager.events.read(3, 10) == [PoolCleared(POOL)]
    manager.open_pool(spec())
    assert run_to_end(manager, 2, PROMPT) == 0


def test_ages_count_lives_rests_and_reuses_in_milliseconds() -> None:
    manager = KVCacheManager(70)
    manager.apply_batch(KVMessage(1, (spec(0, 3),), admits=(Admit(1, POOL, "s", (1, 2, 3, 4, 5), 5),)), 1000)
    manager.apply_batch(KVMessage(2, commits=(Commit(1, 5, ()),), releases=(1,)), 1100)
    manager.apply_batch(KVMessage(3, admits=(Admit(2, POOL, "s", (1, 2, 3, 4, 5), 5),)), 1107)
    manager.apply_batch(KVMessage(4, releases=(2,)), 1200)
    manager.apply_batch(KVMessage(5, admits=(Admit(3, POOL, "s", (9,) * 8, 8),)), 1500)
    ages = manager.pool(POOL).ages
    assert (ages.reuse_gap_ms.total, ages.idle_before_evict_ms.total, ages.lifetime_ms.total) == (7, 300, 500)


def test_histogram_counts_by_power_of_two() -> None:
    histogram = Histogram()
    for value in (-1, 0, 1, 2, 3, 4, 1 << 40):
        histogram.record(value)
    assert histogram.counts[:4] == [2, 1, 2, 1]
    assert histogram.counts[-1] == 1


def test_fragmentation_counts_unused_slots_and_free_runs() -> None:
    manager = KVCacheManager(70)
    manager.open_pool(spec(num_blocks=9))
    for handle, num_tokens in [(1, 3), (2, 4), (3, 5)]:
        manager.admit(Admit(handle, POOL, "s", tuple(range(num_tokens)), num_tokens))
    manager.release(2)
    fragmentation = manager.pool(POOL).fragmentation()
    assert (fragmentation.num_lease_slots, fragmentation.num_unused_slots) == (12, 4)
    assert (fragmentation.num_free_runs, fragmentation.longest_free_run) == (2, 4)
    assert fragmentation.free_runs.counts[:4] == [0, 1, 0, 1]
