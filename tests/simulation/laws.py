"""The laws about order that an observer can check from outside: who was chosen while who waited, and who got how much.

They are stated without the scheduler's own accounts, so that a scheduler that keeps wrong accounts is caught.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

from services.scheduler.core import PriorityClass, RequestEvent, Submission
from tests.simulation.world import World

RANK_BY_CLASS = {PriorityClass.VIP: 0, PriorityClass.NORMAL: 1, PriorityClass.BATCH: 2}
MAX_CHOICES_WITHOUT_AGED = 3


class LawError(AssertionError):
    """Somebody was passed over who should not have been."""


class OrderObserver:
    """Watches which waiting requests are chosen.

    Args:
        world: Its policy says which laws hold.
        may_pass: Whether, by quotas, requests of the first tenant may go before those of the second; None without.
    """

    def __init__(self, world: World, may_pass: Callable[[str, str], bool] | None = None) -> None:
        self._world = world
        self._may_pass = may_pass
        self._policy = world.policy.policy
        self.begin_anew()
        # Where places are reserved for tenants with less than their share, others may have to wait for their own.
        has_reserve = world.limits.max_num_requests >= 4 and len(world.tenants) > 1
        # What quotas hold back misses its turns.
        self._has_turns = (self._policy == "priority" or not has_reserve) and may_pass is None

    def begin_anew(self) -> None:
        """Watch a scheduler that knows nothing of what its predecessor chose."""
        self._arrival_ms_by_id: dict[str, int] = {}
        self._num_chosen_without_aged = 0

    def note_arrival(self, submission: Submission, now_ms: int) -> None:
        """Take note of an accepted request; one that is resumed arrives anew."""
        self._arrival_ms_by_id[submission.request_id] = now_ms

    def check_choices(self, waiting: Iterable[Submission], chosen_ids: Iterable[str], now_ms: int) -> None:
        """Check the choices of one message.

        Args:
            waiting: Who waited before it.
            chosen_ids: Whom blocks were asked for, in order.
            now_ms: The time that the scheduler knows.

        Raises:
            LawError: a law is broken.
        """
        if self._policy not in ("priority", "composed") or not self._world.has_one_model_name:
            return
        waiting_by_id = {submission.request_id: submission for submission in waiting}
        for request_id in chosen_ids:
            chosen = waiting_by_id.pop(request_id, None)
            if chosen is None:
                continue  # it gave way to another one in this very message, and is asked for again
            aged = [other for other in waiting_by_id if self._is_aged(other, now_ms)]
            if self._is_aged(request_id, now_ms):
                self._num_chosen_without_aged = 0
            elif aged:
                self._check_classes(chosen, waiting_by_id.values())
                self._num_chosen_without_aged += 1
                if self._has_turns and self._num_chosen_without_aged > MAX_CHOICES_WITHOUT_AGED:
                    raise LawError(f"{aged} starve: {self._num_chosen_without_aged} others went, lastly {request_id}")
            else:
                self._num_chosen_without_aged = 0
                self._check_classes(chosen, waiting_by_id.values())

    def _check_classes(self, chosen: Submission, waiting: Iterable[Submission]) -> None:
        for other in waiting:
            if self._may_pass is not None and self._may_pass(chosen.tenant, other.tenant):
                continue
            if RANK_BY_CLASS[other.priority] < RANK_BY_CLASS[chosen.priority]:
                raise LawError(f"{chosen.request_id} ({chosen.priority}) went before {other.request_id}")

    def _is_aged(self, request_id: str, now_ms: int) -> bool:
        return now_ms - self._arrival_ms_by_id[request_id] > self._world.policy.ageing_ms


class ShareObserver:
    """Watches how many tokens each tenant gets, in and out.

    The law, from Sheng et al., "Fairness in Serving Large Language Models", theorem 4.4: while two tenants always have
    something waiting, what they get over their weights differs by no more than twice what one may get without being
    compared: a prompt, and the outputs of all that runs.

    Args:
        world: Its policy says whether the law holds.
    """

    def __init__(self, world: World) -> None:
        self._is_law = world.is_backlog and world.policy.policy == "fair"
        self._weights = defaultdict(lambda: 1.0, world.policy.tenant_weights)
        lightest = min(self._weights[tenant] for tenant in world.tenants)
        num_places = world.num_workers * world.limits.max_num_requests
        self._bound = 2 * (world.max_prompt_tokens + num_places * world.max_output_tokens) / lightest
        self._served: defaultdict[str, float] = defaultdict(float)
        self._served_at_start: dict[tuple[str, str], float] = {}
        self._counted: set[str] = set()

    def note_chosen(self, submission: Submission) -> None:
        """Count the prompt of a request when it is chosen for the first time."""
        if submission.request_id not in self._counted:
            self._counted.add(submission.request_id)
            self._serve(submission.tenant, len(submission.prompt_token_ids))

    def note_event(self, submission: Submission, event: RequestEvent) -> None:
        """Count outputs."""
        self._serve(submission.tenant, len(event.token_ids))

    def check(self, waiting_tenants: set[str]) -> None:
        """Compare all tenants that have always had something waiting since the last call and before.

        Raises:
            LawError: one got too much.
        """
        if not self._is_law:
            return
        pairs = {(one, other) for one in waiting_tenants for other in waiting_tenants if one < other}
        self._served_at_start = {
            pair: self._served_at_start.get(pair, self._served[pair[0]] - self._served[pair[1]]) for pair in pairs
        }
        for (one, other), start in self._served_at_start.items():
            difference = self._served[one] - self._served[other] - start
            if abs(difference) > self._bound:
                raise LawError(f"{one} got {difference} tokens more than {other}, more than {self._bound}")

    def _serve(self, tenant: str, num_tokens: int) -> None:
        self._served[tenant] += num_tokens / self._weights[tenant]
