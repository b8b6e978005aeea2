"""Step times fitted to recorded steps."""

import random

import pytest

from services.common.errors import EngineError, ErrorReason
from services.scheduler.plan_log.workload import StepSample
from services.scheduler.replay.step_time import StepTimeModel, fit_step_time


def steps_of(model: StepTimeModel, counts: list[tuple[int, int]]) -> list[StepSample]:
    return [StepSample(p, d, model.duration_us(StepSample(p, d, 0))) for p, d in counts]


def assert_close(fitted: StepTimeModel, expected: StepTimeModel, tolerance_us: float) -> None:
    assert fitted.base_us == pytest.approx(expected.base_us, abs=tolerance_us)
    assert fitted.prefill_token_us == pytest.approx(expected.prefill_token_us, abs=tolerance_us)
    assert fitted.decode_row_us == pytest.approx(expected.decode_row_us, abs=tolerance_us)


def test_rows_are_counted_by_their_length() -> None:
    assert StepSample.count([1, 1, 40, 2], 9) == StepSample(42, 2, 9)


def test_exact_model_is_found_again() -> None:
    model = StepTimeModel(2000.0, 50.0, 300.0)
    counts = [(p, d) for p in (0, 16, 200, 512) for d in (0, 1, 8, 32)]
    fitted = fit_step_time(steps_of(model, counts))
    assert_close(fitted, model, tolerance_us=0.5)
    assert fitted.typical_error(steps_of(model, counts)) < 0.001


def test_noise_and_rare_slow_steps_change_little() -> None:
    rng = random.Random(1)
    model = StepTimeModel(5000.0, 40.0, 400.0)
    counts = [(rng.choice([0, 0, 0, 64, 256]), rng.randint(0, 32)) for _ in range(2000)]
    exact = steps_of(model, counts)
    noisy = [StepSample(s.num_prefill_tokens, s.num_decode_rows, s.duration_us + rng.randint(-200, 200)) for s in exact]
    noisy[:10] = [StepSample(0, 1, 10_000_000)] * 10
    assert_close(fit_step_time(noisy), model, tolerance_us=60.0)


def test_steps_that_are_all_alike_are_all_that_is_known() -> None:
    fitted = fit_step_time([StepSample(0, 4, 1000)] * 5)
    assert fitted.duration_us(StepSample(0, 4, 0)) == 1000


def test_no_coefficient_is_negative() -> None:
    fitted = fit_step_time(
        [StepSample(0, 1, 900), StepSample(0, 2, 500), StepSample(100, 1, 100), StepSample(1, 9, 50)]
    )
    assert min(fitted.base_us, fitted.prefill_token_us, fitted.decode_row_us) >= 0


def test_log_without_a_step_is_refused() -> None:
    with pytest.raises(EngineError) as raised:
        fit_step_time([])
    assert raised.value.reason is ErrorReason.REPLAY_REFUSED
