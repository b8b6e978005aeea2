"""How far a tenant is behind what it is entitled to: a machine of its own, with its share of places and speed.

A tenant that asks for less than its share lends the rest, and so its steps are those of a fuller batch than on its own
machine: its answers take longer, and it has more of them at a time. By the time that they have taken all of its places,
some would have ended there, and made room. This module counts how many.

It runs the tenant's own machine in thought, as a fluid, as generalized processor sharing is run beside a packet
scheduler to order it (Parekh and Gallager, "A generalized processor sharing approach to flow control", IEEE/ACM
Transactions on Networking 1(3), 1993). The unit is a *row*: one request in one step. For ``ms`` of device time, own
steps take ``base + slope / share * tokens``, and advance as many requests as the tenant has that would not have ended
there; here every placed request advances by one row a step. The difference is the lag, and lag over the rows of a mean
answer is how many answers would have ended there and have not here. Where steps take the same time whatever they hold,
there is no lag, however much is lent. Being ahead, by borrowing, counts too, within bounds: a lag begins after it.

Steps are summed up once for all tenants, and a machine is advanced when something about its tenant changes or is asked,
so that a step costs nothing more for it.
"""

from dataclasses import dataclass

from services.scheduler.core.step_time import StepTimeModel

MAX_LAG_RATIO = 0.25
"""Of its share of the places, how much more a tenant that is behind may have, and how far ahead is remembered."""

_NEWEST = 0.05  # weight of an answer in the mean of those of late


@dataclass(slots=True)
class StepSums:
    """Sums over the steps of all workers, and what a machine of one's own is a share of.

    Attributes:
        num_steps: Steps whose times are known.
        busy_ms: Their device time.
        num_workers: How many share the steps.
        num_places: Requests that may run at a time, on all of them; 0 before it is known.
        step_time: How long a step takes, on the worker that finished one last.
    """

    num_steps: int = 0
    busy_ms: float = 0.0
    num_workers: int = 1
    num_places: int = 0
    step_time: StepTimeModel | None = None


@dataclass(slots=True)
class OwnMachine:
    """One tenant's machine in thought.

    Attributes:
        num_lag_rows: Rows computed there and not here; negative when more were here.
        mean_outputs: Output tokens of an answer of late, 0 before the first.
        mean_prompt: Prompt tokens that it had to compute.
        num_seen_steps: As in the sums when it was advanced last.
        seen_ms: The same of their time.
    """

    num_lag_rows: float = 0.0
    mean_outputs: float = 0.0
    mean_prompt: float = 0.0
    num_seen_steps: int = 0
    seen_ms: float = 0.0

    def advance(self, sums: StepSums, share: float, num_live: int, num_placed: int) -> None:
        """Take up the steps since the last call, in which nothing has changed for the tenant.

        Args:
            sums: Of all steps so far.
            share: Of the machine, 0 < share <= 1; nobody is behind on all of it.
            num_live: The tenant's requests.
            num_placed: Those of them that have a place here.
        """
        num_steps, ms = sums.num_steps - self.num_seen_steps, sums.busy_ms - self.seen_ms
        if not num_steps:
            return
        self.num_seen_steps, self.seen_ms = sums.num_steps, sums.busy_ms
        line = None if sums.step_time is None else sums.step_time.line()
        if line is None or share >= 1 or not (self.mean_outputs and num_live and sums.num_places):
            self.num_lag_rows = 0.0
            return
        base_ms, ms_per_token = line
        num_places = share * sums.num_places
        num_there = max(0.0, min(num_places, num_live - self.num_lag_rows / self.mean_outputs)) / sums.num_workers
        num_tokens_a_row = 1 + self.mean_prompt / self.mean_outputs
        step_ms = base_ms + ms_per_token / share * num_there * num_tokens_a_row
        num_rows_there = num_there * ms / step_ms if step_ms > 0 else 0.0
        num_rows_here = num_placed * num_steps / sums.num_workers
        least, most = -MAX_LAG_RATIO * num_places * self.mean_outputs, num_live * self.mean_outputs
        self.num_lag_rows = max(least, min(most, self.num_lag_rows + num_rows_there - num_rows_here))

    def note_answer(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Learn what an answer takes, from one of ``num_output_tokens`` >= 1."""
        weight = _NEWEST if self.mean_outputs else 1.0
        self.mean_outputs += weight * (num_output_tokens - self.mean_outputs)
        self.mean_prompt += weight * (num_prompt_tokens - self.mean_prompt)

    def forget_lag(self) -> None:
        """Begin anew: who asks for nothing is neither behind nor ahead."""
        self.num_lag_rows = 0.0

    def num_places_behind(self, share_of_places: float) -> int:
        """Return how many answers would have ended there and have not here, to the nearest, within the bound."""
        if self.num_lag_rows <= 0:
            return 0
        return min(int(self.num_lag_rows / self.mean_outputs + 0.5), int(MAX_LAG_RATIO * share_of_places))
