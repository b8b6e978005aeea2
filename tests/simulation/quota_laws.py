"""Quotas in a simulated world, and the laws about them that an observer can check from outside.

1. Nobody holds more than its limit, or more than it held already when its limit was lowered.
2. An owner that asks within its reservation has its blocks soon: the denial names who gives way, and nobody takes the
   blocks or the place in between.
3. While a place is free, only those wait whom a denial holds back: a tenant at its limit holds back itself; a pool that
   is exhausted everybody but owners that were not denied themselves.

The second and the third are stated for one worker, since with several a request may wait for another one than it could
go to, and without a target for the step time, which closes places. The second also needs tenants that share no blocks:
what a tenant pays for others to hold cannot be reclaimed.
"""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from services.kv_cache.core import QuotaRule, Quotas
from services.scheduler.core import DenialReason, Denied, KVMessage, KVReply, Submission
from services.scheduler.core.timeline_events import Admitted, Scheduled, Stalled
from tests.simulation.laws import LawError
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

MAX_MESSAGES_TO_RECLAIM = 3
MIN_PLACES_WITH_RESERVE = 4  # places that are kept for tenants with less than their share are no matter of quotas


def draw_quotas(rng: random.Random, world: World) -> Quotas:
    """Draw rules for most of the tenants."""
    rules = []
    free_share = 1.0
    for tenant in world.tenants:
        reserved = min(rng.choice([0.0, 0.4, 0.6]), free_share)
        limit = max(reserved, rng.choice([0.4, 0.5, 1.0, 1.0]))
        free_share -= reserved
        if rng.random() < 0.8:
            rules.append(QuotaRule("*", tenant, reserved, limit))
    return Quotas(tuple(rules))


class QuotaObserver:
    """Sets quotas, changes them live, and holds both cores to the laws.

    Args:
        simulation: The world.
        seed: Of the world; quotas have numbers of their own, so that worlds without any are what they were.
    """

    def __init__(self, simulation: "Simulation", seed: int) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._rng = random.Random(f"rules of {seed}")
        self.is_on = self._world.has_quotas
        self.are_changed_live = self.is_on and self._rng.random() < 0.3
        self.has_private_scopes = self.is_on and self._rng.random() < 0.8
        self.quotas = draw_quotas(self._rng, self._world) if self.is_on else Quotas()
        limits = self._world.limits
        self._has_places_law = (
            self.is_on
            and self._world.num_workers == 1
            and not limits.target_itl_ms
            and (limits.max_num_requests < MIN_PLACES_WITH_RESERVE or not self._world.has_shares)
        )
        self._owners = frozenset[str]()
        self._held_by_account: dict[tuple[str, str], int] = {}
        self.num_reclaimed = self.num_limited = 0
        self.begin_session()

    def begin_session(self) -> None:
        """Forget what was said, and do not heed an answer to it: a process or a stream was lost."""
        sim = self._simulation
        self._num_void_replies = len(sim.kv_messages) + len(sim.kv_replies)
        if self._world.num_workers == 1:
            self._owners = frozenset()  # the pool will be opened anew, and owners told then, if there are any by now
        self._is_exhausted = False
        self._denied_tenants: set[str] = set()
        self._limited_tenants: set[str] = set()
        self._tenant_by_request: dict[str, str] = {}
        self._request_by_handle: dict[int, str] = {}
        self._num_messages_by_reclaimer: dict[str, int] = {}

    def change(self) -> None:
        """Set other quotas, as an operator does."""
        sim = self._simulation
        self.quotas = draw_quotas(self._rng, self._world)
        sim.manager.set_quotas(self.quotas)
        self._num_messages_by_reclaimer.clear()
        for client in sim.client_by_id.values():
            client.may_fail |= not self.fits(client.submission)

    def note_arrival(self, request_id: str) -> None:
        """Take note of a request that comes, perhaps for the second time, after its gateway was lost."""
        self._tenant_by_request.pop(request_id, None)
        self._num_messages_by_reclaimer.pop(request_id, None)

    def wants_change(self) -> bool:
        """Tell whether it is time for other quotas."""
        return self.are_changed_live and self._rng.random() < 0.02

    def adapt(self, submission: Submission) -> Submission:
        """Give a request the cache scope of its tenant, and mostly a size that suits what the tenant may have."""
        if self.has_private_scopes:
            submission = replace(submission, cache_scope=f"of {submission.tenant}")
        if not self.is_on or self._rng.random() < 0.3:
            return submission
        quota, rng = self.quotas.quota_of("", submission.tenant), self._rng
        is_burst = not quota.reserved_ratio or rng.random() < 0.3
        ratio = (quota.limit_ratio if is_burst else quota.reserved_ratio) * rng.uniform(0.3, 1.0)
        num_slots = max(1, int(ratio * (self._world.num_blocks - 1))) * self._world.block_size
        num_tokens = min(num_slots + 1, self._world.max_model_len)
        num_prompt_tokens = rng.randint(1, num_tokens - 1)
        prompt = (submission.prompt_token_ids * num_prompt_tokens)[:num_prompt_tokens]
        return replace(submission, prompt_token_ids=prompt, max_tokens=num_tokens - num_prompt_tokens)

    def fits(self, submission: Submission) -> bool:
        """Tell whether its tenant may hold what a request may grow to."""
        num_tokens = min(len(submission.prompt_token_ids) + submission.max_tokens, self._world.max_model_len)
        return -(-(num_tokens - 1) // self._world.block_size) <= self._limit(submission.tenant)

    def may_pass(self, tenant: str, other: str) -> bool:
        """Tell whether a request of ``tenant`` may go before one of ``other`` that comes first by the policy."""
        return other in self._limited_tenants or tenant in self._owners

    def check_limits(self) -> None:
        """Check the first law, after the manager applied a message.

        Raises:
            LawError: it is broken.
        """
        manager = self._simulation.manager
        for name in manager.pools() if self.is_on else ():
            for account in manager.pool(name).ledger.accounts:
                before = self._held_by_account.get((name, account.tenant), 0)
                self._held_by_account[name, account.tenant] = account.num_held
                if account.num_held > max(self._limit(account.tenant), before):
                    raise LawError(f"{account.tenant} holds {account.num_held} blocks of {name}")

    def note_reply(self, reply: KVReply) -> None:
        """Take note of what the scheduler is about to hear."""
        if not self.is_on:
            return
        for _, owners in reply.pool_owners:
            self._owners = frozenset(owners)
        if self._num_void_replies:
            self._num_void_replies -= 1
            return
        self._note_ends()
        for grant in reply.admitted:
            self._num_messages_by_reclaimer.pop(self._request_by_handle[grant.handle], None)
        for denied in reply.denied:
            self._note_denial(denied)

    def _note_denial(self, denied: Denied) -> None:
        request_id, reason = self._request_by_handle.get(denied.handle), denied.reason
        tenant = self._tenant_by_request.get(request_id or "")
        if request_id is None or tenant is None:
            return  # it has ended since it asked
        if reason is DenialReason.TENANT_LIMIT:
            self._limited_tenants.add(tenant)
            self.num_limited += 1
        elif reason is DenialReason.CAPACITY:
            self._is_exhausted = True
            self._denied_tenants.add(tenant)
        is_waiting = any(each.request_id == request_id for each in self._simulation.waiting_or_asking())
        if denied.reclaim_handles and is_waiting:
            self.num_reclaimed += 1
            self._num_messages_by_reclaimer.setdefault(request_id, 0)
        else:
            self._num_messages_by_reclaimer.pop(request_id, None)  # its tenant has got what is reserved for it by now

    def note_message(self, message: KVMessage) -> None:
        """Check the second and third law, now that the scheduler has said all that it has to say.

        Raises:
            LawError: one is broken.
        """
        if not self.is_on:
            return
        self._note_ends()
        for handle in message.releases:
            self._note_release(handle)
        for admit in message.admits:
            self._request_by_handle[admit.handle] = admit.request_id
            self._tenant_by_request[admit.request_id] = admit.tenant
        self._check_reclaimers()
        self._check_waiting(self._simulation.waiting())

    def _note_release(self, handle: int) -> None:
        """Take note of a lease that was given up; its tenant waits if it had to give way."""
        tenant = self._tenant_by_request.get(self._request_by_handle.pop(handle, ""))
        if tenant is not None:
            self._denied_tenants.add(tenant)

    def _note_ends(self) -> None:
        """Take note of requests that have ended: there is room then, and those at their limit may ask."""
        live = self._simulation.live_ids()
        for request_id in [each for each in self._tenant_by_request if each not in live]:
            tenant = self._tenant_by_request.pop(request_id)
            self._num_messages_by_reclaimer.pop(request_id, None)
            if self._has_ended_running(request_id):
                self._limited_tenants.discard(tenant)
                self._is_exhausted = False
                self._denied_tenants.clear()

    def _has_ended_running(self, request_id: str) -> bool:
        (timeline,) = self._simulation.scheduler.explain(request_id)
        return isinstance(timeline.events[-2], Admitted | Scheduled | Stalled)

    def _check_reclaimers(self) -> None:
        for request_id, num_messages in self._num_messages_by_reclaimer.items():
            self._num_messages_by_reclaimer[request_id] = num_messages + 1
            if num_messages == MAX_MESSAGES_TO_RECLAIM and self._has_places_law and self.has_private_scopes:
                raise LawError(f"{request_id} does not get what is reserved to its tenant")

    def _check_waiting(self, waiting: Iterable[Submission]) -> None:
        if not self._has_places_law or not self._simulation.has_free_place():
            return
        for submission in waiting:
            tenant = submission.tenant
            is_owed = tenant in self._owners and tenant not in self._denied_tenants
            if tenant not in self._limited_tenants and (is_owed or not self._is_exhausted):
                raise LawError(f"{submission.request_id} of {tenant} waits for nothing")

    def _limit(self, tenant: str) -> int:
        return int(self.quotas.quota_of("", tenant).limit_ratio * (self._world.num_blocks - 1) + 1e-9)
