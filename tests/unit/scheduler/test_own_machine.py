import pytest

from services.scheduler.core.own_machine import MAX_LAG_RATIO, OwnMachine, StepSums
from services.scheduler.core.step_time import StepTimeModel


def sums_of(base_ms: float = 4.0, ms_per_token: float = 0.5, num_places: int = 16) -> StepSums:
    model = StepTimeModel()
    for num_tokens in (4, 64, 12, 128, 4):
        model.note(num_tokens, base_ms + ms_per_token * num_tokens)
    return StepSums(num_places=num_places, step_time=model)


def pass_steps(sums: StepSums, num_steps: int, step_ms: float) -> None:
    sums.num_steps += num_steps
    sums.busy_ms += num_steps * step_ms


def machine_of(num_prompt_tokens: int = 0, num_output_tokens: int = 24) -> OwnMachine:
    machine = OwnMachine()
    machine.note_answer(num_prompt_tokens, num_output_tokens)
    return machine


def test_tenant_alone_in_a_full_batch_is_behind_by_what_its_own_steps_are_shorter() -> None:
    sums, machine = sums_of(), machine_of()
    pass_steps(sums, 1, step_ms=12.0)
    machine.advance(sums, share=0.5, num_live=2, num_placed=2)
    # Two rows take 4 + 2 * 1 = 6 ms on half a machine: in 12 ms two steps, where there was one here.
    assert machine.num_lag_rows == pytest.approx(2.0)


def test_prompts_count_in_a_step_of_ones_own() -> None:
    sums, machine = sums_of(), machine_of(num_prompt_tokens=48)
    pass_steps(sums, 1, step_ms=20.0)
    machine.advance(sums, share=0.5, num_live=2, num_placed=2)
    # Each row comes with two tokens of a prompt: 4 + 2 * 3 = 10 ms.
    assert machine.num_lag_rows == pytest.approx(2.0)


def test_tenant_that_fills_its_share_is_not_behind() -> None:
    sums, machine = sums_of(), machine_of()
    pass_steps(sums, 100, step_ms=12.0)
    machine.advance(sums, share=0.5, num_live=50, num_placed=8)
    assert machine.num_lag_rows == pytest.approx(0.0)


def test_nobody_is_behind_where_steps_take_the_same_time_whatever_they_hold() -> None:
    sums, machine = sums_of(ms_per_token=0.0), machine_of()
    pass_steps(sums, 100, step_ms=4.0)
    machine.advance(sums, share=0.5, num_live=3, num_placed=3)
    assert machine.num_lag_rows == pytest.approx(0.0)


def test_who_waits_for_a_place_is_behind_by_what_it_would_compute() -> None:
    sums, machine = sums_of(), machine_of()
    pass_steps(sums, 1, step_ms=12.0)
    machine.advance(sums, share=0.5, num_live=8, num_placed=6)
    assert machine.num_lag_rows == pytest.approx(2.0)


def test_own_machine_runs_dry_when_it_has_answered_all() -> None:
    sums, machine = sums_of(), machine_of(num_output_tokens=10)
    for _ in range(1000):
        pass_steps(sums, 1, step_ms=12.0)
        machine.advance(sums, share=0.5, num_live=2, num_placed=1)
    assert 10 < machine.num_lag_rows <= 20


def test_lag_counts_as_places_to_the_nearest_answer_and_up_to_a_part_of_the_share() -> None:
    machine = machine_of(num_output_tokens=10)
    places = []
    for num_rows in (-30, 4, 5, 14, 15, 99):
        machine.num_lag_rows = num_rows
        places.append(machine.num_places_behind(8))
    assert places == [0, 0, 1, 1, 2, 8 * MAX_LAG_RATIO]
    assert machine.num_places_behind(3) == 0


def test_being_ahead_is_remembered_within_bounds_and_made_good_first() -> None:
    sums, machine = sums_of(), machine_of(num_output_tokens=10)
    pass_steps(sums, 100, step_ms=12.0)
    machine.advance(sums, share=0.5, num_live=50, num_placed=14)
    assert machine.num_lag_rows == -MAX_LAG_RATIO * 8 * 10
    pass_steps(sums, 1, step_ms=12.0)
    machine.advance(sums, share=0.5, num_live=50, num_placed=4)
    assert machine.num_lag_rows == pytest.approx(-16.0)
    machine.forget_lag()
    assert machine.num_lag_rows == 0


@pytest.mark.parametrize("what", ["no answer", "one size of steps", "whole machine", "no requests", "no places"])
def test_no_lag_is_counted_without_knowing_what_it_would_be_by(what: str) -> None:
    machine = OwnMachine() if what == "no answer" else machine_of()
    sums = sums_of(num_places=0 if what == "no places" else 16)
    if what == "one size of steps":
        sums.step_time = StepTimeModel()
    pass_steps(sums, 5, step_ms=12.0)
    share, num_live = 1.0 if what == "whole machine" else 0.5, 0 if what == "no requests" else 2
    machine.advance(sums, share=share, num_live=num_live, num_placed=0)
    assert machine.num_lag_rows == 0


def test_steps_of_several_workers_are_shared_by_the_requests_on_them() -> None:
    sums, machine = sums_of(num_places=32), machine_of()
    sums.num_workers = 2
    pass_steps(sums, 2, step_ms=12.0)  # one on each
    machine.advance(sums, share=0.5, num_live=4, num_placed=4)
    assert machine.num_lag_rows == pytest.approx(4.0)


def test_mean_answer_follows_those_of_late() -> None:
    machine = machine_of(num_prompt_tokens=100, num_output_tokens=20)
    machine.note_answer(0, 40)
    assert [machine.mean_prompt, machine.mean_outputs] == pytest.approx([95, 21])
