"""What can go wrong in a simulated world: processes that die, streams that break, steps that fail.

A stream that breaks loses what lies in its channels; what its receiver had taken out before counts. A worker that lives
on keeps its memory, and a manager that lives on what it has cached.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from services.scheduler.core import Scheduler
from tests.simulation.kv_wire import message_to_kv_cache
from tests.simulation.laws import ShareObserver

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation, WorkerSite


class Faults:
    """Brings faults upon one world.

    Args:
        simulation: The world.
    """

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation

    def actions(self) -> list[Callable[[], object]]:
        """List what may go wrong now; a worker that is not there may come."""
        sim = self._simulation
        lost_streams = [partial(self._lose_stream, name) for name in sim.site_by_worker]
        lost_workers = [partial(self._flap_worker, name) for name in sim.worker_names]
        lost_peers = [self._lose_kv_cache, self._lose_session, self._lose_scheduler]
        faults: list[Callable[[], object]] = [*lost_peers, self._fail_step, *lost_streams, *lost_workers]
        return [partial(self._bring, fault) for fault in faults]

    def _bring(self, fault: Callable[[], object]) -> object:
        outcome = fault()
        if outcome is not False:
            self._simulation.quotas.begin_session()
        return outcome

    def _flap_worker(self, name: str) -> None:
        """Lose a worker with all that is under way, or bring it back; a result that was late must not count."""
        sim = self._simulation
        lost = sim.site_by_worker.pop(name, None)
        if lost is not None:
            sim.scheduler.close_worker(name)
        if lost is None or sim.rng.random() < 0.5:
            sim.open_worker(name)
        if lost is not None and lost.results:
            sim.scheduler.apply(name, lost.results[0])

    def _fail_step(self) -> bool:
        """Have a worker die of a plan: the requests in it end, the others go on when it is back; False without one."""
        sim = self._simulation
        for name, site in sim.site_by_worker.items():
            if site.plans and not site.results:
                plan = site.plans.popleft()
                known = {request.handle: request.request_id for request in plan.new_requests}
                for row in plan.rows:
                    sim.allow_failure(known.get(row.handle) or site.worker.request_id_of(row.handle))
                sim.scheduler.apply_failure(name, plan.plan_id, "the device failed")
                sim.open_worker(name)
                return True
        return False

    def _lose_kv_cache(self) -> None:
        """Lose the KV-cache manager with its channels."""
        sim = self._simulation
        sim.num_lives += 1
        sim.start_manager(epoch=1000 * sim.num_lives)
        self._reset_session()

    def _lose_session(self) -> None:
        """Lose the channels to a manager that lives on, and may have heard what it cannot answer any more."""
        self._hear_lost_messages()
        self._reset_session()

    def _hear_lost_messages(self) -> None:
        sim = self._simulation
        while sim.kv_messages and sim.rng.random() < 0.5:
            sim.manager.apply_batch(message_to_kv_cache(sim.kv_messages.popleft()))
        sim.manager.suspend_pools()
        sim.manager.check_invariants()

    def _reset_session(self) -> None:
        """Begin another session; a reply that was late must not count."""
        sim = self._simulation
        late_replies = list(sim.kv_replies)
        sim.kv_messages.clear()
        sim.kv_replies.clear()
        sim.scheduler.reset_kv()
        for reply in late_replies:
            sim.scheduler.apply_kv_reply(reply)

    def _lose_stream(self, name: str) -> None:
        """Lose the stream to a worker that lives on, and comes back as the life that it was."""
        sim = self._simulation
        site = sim.site_by_worker[name]
        self._execute_lost_plans(site)
        sim.scheduler.close_worker(name)
        sim.scheduler.open_worker(site.worker.info)

    def _execute_lost_plans(self, site: "WorkerSite") -> None:
        """Let a worker execute what it has received of a stream that broke; it finishes that before another begins."""
        sim = self._simulation
        while site.plans and sim.rng.random() < 0.5:
            site.worker.execute(site.plans.popleft())
        site.plans.clear()
        site.results.clear()
        site.worker.begin_session()

    def _lose_scheduler(self) -> None:
        """Lose the scheduler with all that it knows; gateways tell its successor what their clients have received."""
        sim = self._simulation
        sim.num_lives += 1
        sim.scheduler = Scheduler(sim.world.limits, 1_000_000 * sim.num_lives, sim.world.policy)
        sim.order.begin_anew()
        sim.shares = ShareObserver(sim.world)
        self._hear_lost_messages()
        sim.kv_messages.clear()
        sim.kv_replies.clear()
        for name, site in list(sim.site_by_worker.items()):
            if sim.rng.random() < 0.3:
                sim.open_worker(name)  # it died too
            else:
                self._execute_lost_plans(site)
                sim.scheduler.open_worker(site.worker.info)
        for request_id, client in list(sim.client_by_id.items()):
            if client.finish is None:
                if client.is_cancelled:
                    del sim.client_by_id[request_id]  # its gateway knows that nobody waits for it
                else:
                    sim.submit(client)
