import random

import pytest

from services.scheduler.core import SchedulerLimits
from services.scheduler.core.step_time import StepTimeModel
from services.scheduler.core.token_budget import budget_within_target


def learnt(*steps: tuple[int, float]) -> StepTimeModel:
    model = StepTimeModel()
    for num_tokens, time_ms in steps:
        model.note(num_tokens, time_ms)
    return model


def test_nothing_is_known_before_the_first_step() -> None:
    assert StepTimeModel().tokens_within(10) is None
    assert StepTimeModel().fastest_ms is None


def test_line_through_the_steps_is_found() -> None:
    model = learnt(*((tokens, 8 + tokens / 4) for tokens in (4, 64, 12, 128, 4)))
    assert model.tokens_within(20) == 48
    assert model.tokens_within(7) == 0


def test_line_is_found_through_noise() -> None:
    rng = random.Random(1)
    model = learnt(*((n, (8 + n / 4) * rng.uniform(0.9, 1.1)) for n in (rng.randint(1, 200) for _ in range(300))))
    assert model.tokens_within(20) == pytest.approx(48, abs=6)


def test_steps_of_one_size_say_nothing_while_they_are_in_time_and_shrink_in_proportion_when_not() -> None:
    model = learnt((8, 10.0), (8, 10.0))
    assert model.tokens_within(12) is None
    assert model.tokens_within(5) == 4


def test_slope_of_the_last_prompts_is_kept_while_only_decodes_are_seen() -> None:
    model = learnt((4, 10.0), (204, 110.0), *[(4, 10.0)] * 1000)
    assert model.tokens_within(60) == pytest.approx(104, abs=1)


def test_line_follows_a_device_that_slows_down() -> None:
    model = learnt(*[(n, n / 4) for n in (4, 64) * 50], *[(n, n / 2) for n in (4, 64) * 200])
    assert model.tokens_within(20) == pytest.approx(40, abs=1)


def test_fastest_step_is_remembered_and_slowly_forgotten() -> None:
    model = learnt((1, 5.0), (1, 20.0))
    assert model.fastest_ms == pytest.approx(5.15)
    for _ in range(1000):
        model.note(1, 20.0)
    assert model.fastest_ms == pytest.approx(20, abs=0.01)


def test_budget_is_the_whole_step_without_a_target_or_knowledge() -> None:
    model = learnt((4, 10.0), (204, 110.0))
    assert budget_within_target(SchedulerLimits(), model) == 544
    assert budget_within_target(SchedulerLimits(target_itl_ms=60), StepTimeModel()) == 544
    assert budget_within_target(SchedulerLimits(target_itl_ms=60), model) == 104
    assert budget_within_target(SchedulerLimits(target_itl_ms=6000), model) == 544


def test_line_is_told_once_steps_of_two_sizes_are_known() -> None:
    assert learnt((8, 6.0), (8, 6.0)).line() is None
    line = learnt((4, 6.0), (64, 36.0)).line()
    assert line is not None
    assert list(line) == pytest.approx([4.0, 0.5])
