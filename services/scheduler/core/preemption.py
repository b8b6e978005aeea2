"""Who gives way, when a worker's pool has no block left for a running request, or no place for a vip.

By recompute: the victim's blocks are released, its known tokens stay, and it waits again at the place that the policy
gives it. (Swapping to a host tier would differ only in what becomes of the blocks, which is the broker's affair; whom
to choose would stay as it is here.)

Among running requests there is a fixed order of *standing*: class first, then arrival. Every second time that a
request has had to give way raises it by a class, so that a stream of vips cannot undo the same work for ever.

- *Progress.* The running request of best standing is never a victim for want of blocks unless it runs alone, and alone
  it fits (checked when it was admitted). So it runs to its end, and then the next best is the best.
- *No ping-pong.* After a preemption for want of blocks the lane admits nobody until one of its requests has ended.
  Otherwise the victim, whose blocks were just freed, would be admitted again at once, only to be preempted at the next
  block that another request needs. After a preemption for a place, the one that took it is no one's to displace, and if
  it finds no blocks there, nobody is admitted until a request has ended, as above; after one for what is reserved to a
  tenant, the request that reclaimed it is asked for first.
"""

from collections.abc import Iterable

from services.scheduler.core.kv_messages import DenialReason, Denied
from services.scheduler.core.lane import Lane
from services.scheduler.core.policies.protocol import Policy
from services.scheduler.core.request import Request
from services.scheduler.core.tenant_ledger import TenantLedger
from services.scheduler.core.timeline_events import PreemptionCause

PREEMPTIONS_PER_CLASS = 2
"""So many preemptions raise a request's standing by one class."""

LEVELS_TO_DISPLACE = 2
"""A waiting request takes the place of a running one that is so many classes below: a vip that of batch work."""


def standing_level(request: Request, policy: Policy) -> int:
    """Level of the request's class, 0 being the highest, raised for what it has suffered."""
    return max(0, policy.level_of(request) - request.num_preemptions // PREEMPTIONS_PER_CLASS)


def choose_victim(running: Iterable[Request], policy: Policy) -> Request:
    """Choose whom to preempt for want of blocks among ``running``, which is not empty.

    Of all but the one of best standing: the lowest class, then who loses fewest tokens, then the latest. Tokens lost
    are compared by magnitude (powers of two), so that a small difference does not decide against a late arrival.
    """
    candidates = list(running)
    if len(candidates) > 1:
        candidates.remove(min(candidates, key=lambda request: (standing_level(request, policy), request.arrival)))
    return max(candidates, key=lambda request: _sacrifice(request, policy))


def find_displaceable(waiting: Request, running: Iterable[Request], policy: Policy) -> list[Request]:
    """Return those of ``running`` whose places ``waiting`` may take, the best to take first."""
    level = policy.level_of(waiting) + LEVELS_TO_DISPLACE
    displaceable = [request for request in running if standing_level(request, policy) >= level]
    return sorted(displaceable, key=lambda request: _sacrifice(request, policy), reverse=True)


def victims_for_running(
    lane: Lane, request: Request, denied: Denied, policy: Policy
) -> tuple[list[Request], PreemptionCause]:
    """Choose who gives way to a running request whose refill was denied; it may be that request itself.

    Whom the manager names; else one of the tenant's own, if the tenant is at its limit; else one of all.
    """
    running = lane.running
    if denied.reason is DenialReason.TENANT_LIMIT:
        own = [each for each in running.values() if each.submission.tenant == request.submission.tenant]
        return [choose_victim(own, policy)], PreemptionCause.TENANT_LIMIT
    named = [running[handle] for handle in denied.reclaim_handles if handle in running]
    if named:
        return named, PreemptionCause.BURST_RECLAIMED
    return [choose_victim(running.values(), policy)], PreemptionCause.OUT_OF_BLOCKS


def victims_for_waiting(
    lane: Lane, request: Request, denied: Denied, policy: Policy
) -> tuple[list[Request], PreemptionCause]:
    """Choose who gives way to a waiting request whose admission was denied; nobody, if that would not be enough.

    Whom the manager names; else those that the request may displace, if they have enough blocks.
    """
    named = [lane.running[handle] for handle in denied.reclaim_handles if handle in lane.running]
    if named:
        return named, PreemptionCause.BURST_RECLAIMED
    victims: list[Request] = []
    num_blocks_missing = denied.num_blocks_needed - denied.num_free_blocks
    if denied.reason is DenialReason.CAPACITY or lane.holds.is_limited(request.submission.tenant):
        for victim in find_displaceable_in(lane, request, policy, is_for_blocks=True):
            if num_blocks_missing <= 0:
                break
            num_blocks_missing -= len(victim.block_ids)  # those that it shares stay held; then the next denial goes on
            victims.append(victim)
    return victims if num_blocks_missing <= 0 else [], PreemptionCause.BLOCKS_TAKEN


def find_displaceable_in(lane: Lane, waiting: Request, policy: Policy, *, is_for_blocks: bool) -> list[Request]:
    """Return those who run in ``lane`` and may give way to ``waiting``, the best to take first.

    Who is at its tenant's limit gains nothing by what others hold; and blocks, unlike places, are not to be had from
    tenants that have a reservation: what they hold beyond it, the KV-cache manager reclaims.
    """
    tenant = waiting.submission.tenant
    if lane.holds.is_limited(tenant):
        running = [request for request in lane.running.values() if request.submission.tenant == tenant]
    elif is_for_blocks and lane.holds.owners:
        safe = lane.holds.owners - {tenant}
        running = [request for request in lane.running.values() if request.submission.tenant not in safe]
    else:
        running = list(lane.running.values())
    return find_displaceable(waiting, running, policy)


def find_borrowers(
    lane: Lane, waiting: Request, policy: Policy, ledger: TenantLedger, num_places: int, num_step_tokens: int
) -> list[Request]:
    """Return those who run in ``lane`` on places lent to their tenants, which ``waiting`` may have back, best first.

    Places that a tenant does not use are lent to others. It gets them back as soon as it needs them, up to its share
    of ``num_places``, from tenants that keep theirs; of no higher class than its own. So nobody claims a place back in
    turn, and what a tenant has within its share runs on undisturbed. Shares are those of the ledger, which are larger
    for who is behind.

    Shares of places serve shares of tokens: within a class nothing is claimed back from a tenant that waits too and has
    had fewer tokens, unless by no more than the ``num_step_tokens`` of a step. For a tenant that begins to wait stands
    where the others do, and a prompt later it is behind them; that alone must not keep it from its places.
    """
    account = waiting.account
    if lane.holds.is_limited(waiting.submission.tenant) or not ledger.is_owed_a_place(account, num_places):
        return []
    level, least_counter = policy.level_of(waiting), account.counter - num_step_tokens / account.weight

    def is_behind(request: Request) -> bool:
        is_competing = request.account.num_waiting and policy.level_of(request) == level
        return bool(is_competing) and request.account.counter < least_counter

    borrowers = [
        request
        for request in lane.running.values()
        if policy.level_of(request) >= level
        and ledger.can_spare_a_place(request.account, num_places)
        and not is_behind(request)
    ]
    return sorted(borrowers, key=lambda request: _sacrifice(request, policy), reverse=True)


def _sacrifice(request: Request, policy: Policy) -> tuple[int, int, int]:
    """Key that is largest for the request whose preemption harms least."""
    return standing_level(request, policy), -request.num_computed_tokens.bit_length(), request.arrival
