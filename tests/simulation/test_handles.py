"""Random worlds in which, after every event, all handles are accounted for, and in which workers drain now and then.

What `treadle kv fsck` relies on: a lease of the manager, or a request on a worker, always has a handle that the
scheduler names, whatever is under way or was lost; and a request that runs always has its lease.
"""

from collections.abc import Callable
from functools import partial

import pytest

from services.kv_cache.core.prefix_hash import PrefixHash, sha256
from services.scheduler.core.lane import Lane
from services.scheduler.core.lane_holds import AskTerms
from services.scheduler.core.scheduler import Scheduler
from tests.simulation.simulation import Simulation, SimulationError
from tests.simulation.test_simulation import SEEDS_PER_TEST

NUM_SEEDS = 200


class WatchedSimulation(Simulation):
    """A world whose handles are looked at after every event, and whose workers drain."""

    def __init__(self, seed: int, prefix_hash: PrefixHash = sha256) -> None:
        super().__init__(seed, prefix_hash)
        self.allowed_by_draining_worker: dict[str, set[int]] = {}
        self.num_drained = 0
        self.num_drained_with_work = 0

    def open_worker(self, name: str) -> None:
        self.allowed_by_draining_worker.pop(name, None)
        super().open_worker(name)

    def _do(self, action: Callable[[], object]) -> object:
        outcome = super()._do(action)
        self._check_handles()
        # Whoever was lost does not drain any more, and a new scheduler knows of no drain.
        draining = {worker.worker for worker in self.scheduler.load().workers if worker.is_draining}
        for name in self.allowed_by_draining_worker.keys() - draining:
            del self.allowed_by_draining_worker[name]
        return outcome

    def _fault_actions(self) -> list[Callable[[], object]]:
        actions = super()._fault_actions()
        if self.rng.random() < 0.05:
            actions += [partial(self._drain, name) for name in self.site_by_worker]
        return actions

    def _shell_work(self) -> list[Callable[[], object]]:
        return [*super()._shell_work(), *(partial(self._let_go, name) for name in [*self.allowed_by_draining_worker])]

    def _plan(self, name: str) -> bool:
        is_planned = super()._plan(name)
        allowed = self.allowed_by_draining_worker.get(name)
        if is_planned and allowed is not None:
            new_handles = {request.handle for request in self.site_by_worker[name].plans[-1].new_requests}
            if not new_handles <= allowed:
                raise SimulationError(f"{name} drains and got {new_handles - allowed}")
        return is_planned

    def _drain(self, name: str) -> None:
        """Have a worker announce that it is about to stop; it may get what was asked for before, and nothing else."""
        if name in self.allowed_by_draining_worker:
            return
        self.scheduler.drain_worker(name)
        (worker,) = [worker for worker in self.scheduler.list_handles().workers if worker.worker == name]
        allowed = {*(handle for handle, _ in worker.running), *worker.admitting}
        self.allowed_by_draining_worker[name] = allowed
        self.num_drained_with_work += bool(allowed)

    def _let_go(self, name: str) -> bool:
        """Replace a worker that has nothing left; nobody may lose anything by that."""
        if name not in self.allowed_by_draining_worker or not self.scheduler.is_drained(name):
            return False
        site = self.site_by_worker[name]
        num_preemptions = self.scheduler.load().num_preemptions
        self.scheduler.close_worker(name)
        if site.plans or site.results or site.worker.num_known_requests:
            raise SimulationError(f"{name} was let go before it had answered and forgotten everything")
        if self.scheduler.load().num_preemptions != num_preemptions:
            raise SimulationError(f"{name} was let go with work")
        self.open_worker(name)
        self.num_drained += 1
        return True

    def _check_handles(self) -> None:
        handles = self.scheduler.list_handles()
        running = {worker.worker: {handle for handle, _ in worker.running} for worker in handles.workers}
        known = set(handles.leaving).union(*running.values(), *(worker.admitting for worker in handles.workers))
        for pool in self.manager.pools():
            if pool in handles.unsettled_pools:
                continue
            leased = self.manager.pool(pool).lease_by_handle.keys()
            if not leased <= known:
                raise SimulationError(f"the leases {leased - known} are nobody's")
            if not running.get(pool, set()) <= leased:
                raise SimulationError(f"{running[pool] - leased} run without a lease")
        for name, site in self.site_by_worker.items():
            on_worker = site.worker.known_handles
            if not on_worker <= known:
                raise SimulationError(f"{name} knows {on_worker - known}, which are nobody's")


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_every_handle_is_accounted_for_and_draining_workers_lose_nothing(first_seed: int) -> None:
    num_drained = num_drained_with_work = 0
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        simulation = WatchedSimulation(seed)
        try:
            simulation.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        num_drained += simulation.num_drained
        num_drained_with_work += simulation.num_drained_with_work
    assert num_drained > SEEDS_PER_TEST
    assert num_drained_with_work > SEEDS_PER_TEST // 2


def first_failure(num_seeds: int) -> str:
    for seed in range(num_seeds):
        try:
            WatchedSimulation(seed).run()
        except SimulationError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_handle_that_is_named_too_short_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.core.kv_outbox.KVOutbox.unanswered_releases", lambda outbox: [])
    assert "are nobody's" in first_failure(20)


@pytest.mark.slow
def test_worker_that_is_let_go_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "is_drained", lambda scheduler, worker: True)
    assert "was let go" in first_failure(20)


@pytest.mark.slow
def test_draining_worker_that_gets_more_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def terms_for(lane: Lane, tenant: str) -> AskTerms:
        return lane.holds.terms_for(tenant) if lane.running else AskTerms.FREE

    monkeypatch.setattr(Lane, "terms_for", terms_for)
    assert "drains and got" in first_failure(20)
