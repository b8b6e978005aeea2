"""How long a step takes, fitted to recorded steps: a constant, a time a prefill token, a time a decoding row.

Least squares over the steps without the slowest hundredth, which are first steps and the machine's other affairs. The
growth of attention with the context is not modelled; it is in the averages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.common.errors import EngineError, ErrorReason
from services.scheduler.plan_log.workload import StepSample

_KEPT_RATIO: Final = 0.99
_PIVOT: Final = 1e-9


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Step times, in us.

    Attributes:
        base_us: Of any step.
        prefill_token_us: Of each token in rows of more than one.
        decode_row_us: Of each row of one token.
    """

    base_us: float
    prefill_token_us: float
    decode_row_us: float

    def duration_us(self, step: StepSample) -> int:
        """Return how long a step with these counts takes, at least 1 us. Pure."""
        tokens_us = self.prefill_token_us * step.num_prefill_tokens + self.decode_row_us * step.num_decode_rows
        return max(1, round(self.base_us + tokens_us))

    def typical_error(self, steps: Sequence[StepSample]) -> float:
        """Return the median of the relative errors on ``steps``, at least one. Pure."""
        errors = sorted(abs(self.duration_us(step) / max(step.duration_us, 1) - 1.0) for step in steps)
        return errors[len(errors) // 2]


def fit_step_time(steps: Sequence[StepSample]) -> StepTimeModel:
    """Fit a model to recorded steps. Pure.

    A coefficient that would be negative, or that the steps cannot tell from the others, is 0.

    Raises:
        EngineError: REPLAY_REFUSED when there is no step.
    """
    if not steps:
        raise EngineError(ErrorReason.REPLAY_REFUSED, "the log holds no executed step to learn step times from")
    by_time = sorted(steps, key=lambda step: step.duration_us)
    kept = by_time[: max(1, int(len(by_time) * _KEPT_RATIO))]
    rows = [(1.0, float(step.num_prefill_tokens), float(step.num_decode_rows)) for step in kept]
    targets = [float(step.duration_us) for step in kept]
    columns = [0, 1, 2]
    while True:
        solution = _least_squares(rows, targets, columns)
        if min(solution.values()) >= 0 or len(columns) == 1:
            break
        columns.remove(min(solution, key=lambda column: solution[column]))
    return StepTimeModel(*(max(0.0, solution.get(column, 0.0)) for column in (0, 1, 2)))


def _least_squares(
    rows: Sequence[tuple[float, float, float]], targets: Sequence[float], columns: Sequence[int]
) -> dict[int, float]:
    """Solve the normal equations of some columns by elimination; a column that depends on earlier ones gets 0."""
    matrix = [
        [sum(row[a] * row[b] for row in rows) for b in columns]
        + [sum(row[a] * target for row, target in zip(rows, targets, strict=True))]
        for a in columns
    ]
    scale = [max(matrix[index][index], 1.0) for index in range(len(columns))]
    for pivot in range(len(columns)):
        is_dependent = abs(matrix[pivot][pivot]) <= _PIVOT * scale[pivot]
        for other in range(len(columns)):
            if is_dependent:
                matrix[other][pivot] = float(other == pivot)
            elif other != pivot:
                factor = matrix[other][pivot] / matrix[pivot][pivot]
                matrix[other] = [x - factor * y for x, y in zip(matrix[other], matrix[pivot], strict=True)]
        if is_dependent:
            matrix[pivot] = [float(index == pivot) for index in range(len(columns))] + [0.0]
    return {column: matrix[index][-1] / matrix[index][index] for index, column in enumerate(columns)}
