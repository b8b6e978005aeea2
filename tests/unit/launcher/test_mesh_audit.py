"""The comparison of what manager, scheduler and workers hold: what is a leak, and what is only a moment."""

from dataclasses import replace

import pytest

from services.launcher.mesh_audit import (
    Disagreement,
    DisagreementKind,
    Lane,
    Lease,
    Leases,
    Running,
    SchedulerHandles,
    Snapshot,
    WorkerRequests,
    confirm,
    find_disagreements,
    why_unsettled,
)

WORKER = "worker-0"
KV_CACHE_EPOCH, SCHEDULER_EPOCH, WORKER_EPOCH = 1, 2, 3


def snapshot(
    leases: tuple[int, ...] = (),
    running: tuple[int, ...] = (),
    on_worker: tuple[int, ...] = (),
    admitting: tuple[int, ...] = (),
    leaving: tuple[int, ...] = (),
    unsettled_pools: tuple[str, ...] = (),
) -> Snapshot:
    lane = Lane(WORKER, WORKER_EPOCH, tuple(Running(handle, f"r{handle}") for handle in running), frozenset(admitting))
    return Snapshot(
        Leases(KV_CACHE_EPOCH, tuple(Lease(WORKER, handle, f"r{handle}", 2) for handle in leases)),
        (WorkerRequests(WORKER, WORKER_EPOCH, SCHEDULER_EPOCH, frozenset(on_worker)),),
        SchedulerHandles(SCHEDULER_EPOCH, (lane,), frozenset(leaving), frozenset(unsettled_pools)),
    )


def leaked(handle: int) -> Disagreement:
    return Disagreement(DisagreementKind.LEAKED_LEASE, WORKER, handle, f"r{handle}")


def missing(handle: int) -> Disagreement:
    return Disagreement(DisagreementKind.MISSING_LEASE, WORKER, handle, f"r{handle}")


def unknown(handle: int) -> Disagreement:
    return Disagreement(DisagreementKind.UNKNOWN_REQUEST, WORKER, handle, "")


@pytest.mark.parametrize(
    "agreeing",
    [
        snapshot(),
        snapshot(leases=(1, 2), running=(1, 2), on_worker=(1, 2)),
        snapshot(leases=(1,), running=(1,)),  # the worker hears of it with its first plan
        snapshot(admitting=(1,)),  # the question is under way
        snapshot(leases=(1,), admitting=(1,)),  # or the answer
        snapshot(leases=(1,), on_worker=(1,), leaving=(1,)),
    ],
)
def test_no_disagreement_is_found_on_the_way_of_a_request(agreeing: Snapshot) -> None:
    assert find_disagreements(agreeing) == frozenset()


def test_each_kind_is_found() -> None:
    found = find_disagreements(snapshot(leases=(1, 4), running=(1, 2), on_worker=(1, 3, 4)))
    assert found == {leaked(4), missing(2), unknown(3), unknown(4)}


def test_lease_in_the_pool_of_another_worker_is_no_lease_of_the_request() -> None:
    other = snapshot(leases=(1,), running=(1,))
    other = replace(other, leases=Leases(KV_CACHE_EPOCH, (Lease("worker-1", 1, "r1", 2),)))
    assert find_disagreements(other) == {missing(1)}


def test_disagreement_is_confirmed_when_it_was_there_both_times() -> None:
    first = snapshot(leases=(1, 2, 9), running=(1, 5), on_worker=(1, 7))
    second = snapshot(leases=(3, 9), running=(3, 5), on_worker=(7, 8))
    assert confirm(first, second) == (leaked(9), missing(5), unknown(7))


def test_what_was_there_only_once_is_not_confirmed() -> None:
    # Released and granted between the questions to the manager and to the scheduler.
    assert confirm(snapshot(leases=(1,)), snapshot(running=(2,))) == ()


@pytest.mark.parametrize(
    "second",
    [
        replace(snapshot(leases=(9,)), leases=Leases(KV_CACHE_EPOCH + 1, snapshot(leases=(9,)).leases.leases)),
        replace(snapshot(leases=(9,)), scheduler=replace(snapshot().scheduler, scheduler_epoch=SCHEDULER_EPOCH + 1)),
        replace(snapshot(leases=(9,)), workers=()),
        snapshot(leases=(9,), unsettled_pools=(WORKER,)),
    ],
    ids=["manager", "scheduler", "worker", "unsettled"],
)
def test_nothing_is_said_over_a_change_of_lives_or_of_pools(second: Snapshot) -> None:
    assert confirm(snapshot(leases=(9,)), second) is None
    assert confirm(second, snapshot(leases=(9,))) is None


def test_snapshot_is_settled_when_each_worker_obeys_the_scheduler_and_no_pool_is_under_way() -> None:
    settled = snapshot()
    (worker,) = settled.workers
    assert why_unsettled(settled) is None
    assert why_unsettled(snapshot(unsettled_pools=(WORKER,))) == "the pool of worker-0 is being opened or closed"
    apart = "worker-0 and the scheduler are not connected"
    assert why_unsettled(replace(settled, workers=(replace(worker, scheduler_epoch=0),))) == apart
    assert why_unsettled(replace(settled, workers=(replace(worker, worker_epoch=9),))) == apart
    assert why_unsettled(replace(settled, scheduler=replace(settled.scheduler, lanes=()))) == apart
