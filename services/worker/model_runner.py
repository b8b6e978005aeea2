"""Executes batch plans: check, learn, prepare, forward, sample, record.

Owns: the model, the KV storage and the requests' state; used by one thread. Guarantees: plans take effect strictly in
order; a plan that breaks a law changes nothing; a step that fails makes the requests of its rows unusable, so that
plans already under way for them (run-ahead) pass over them.
"""

from collections.abc import Sequence

import torch

from services.common.clock import Clock, SystemClock
from services.common.errors import EngineError, ErrorReason, InvariantError
from services.common.verify import require
from services.worker.host_codec import PlainCodec
from services.worker.host_tier import HostTier
from services.worker.input_batch import InputBatch, StepInputs
from services.worker.kv_storage import KVStorage
from services.worker.models.decoder import Decoder
from services.worker.plan import BatchPlan, Handle, RowError, SampledToken, StepResult, StepTimings
from services.worker.sampler import sample


class ModelRunner:
    """One model on one device.

    Args:
        model: Built and loaded.
        kv_storage: Of the model's shape and dtype.
        max_num_batched_tokens: Most tokens of a step; bounds the activations' memory.
        host_tier: Over the same storage; None: there is none.
        clock: Times the parts of a step.
    """

    def __init__(
        self,
        model: Decoder,
        kv_storage: KVStorage,
        *,
        max_num_batched_tokens: int,
        host_tier: HostTier | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._model = model
        self._kv_storage = kv_storage
        self._max_num_batched_tokens = max_num_batched_tokens
        self._host_tier = host_tier or HostTier(0, PlainCodec(0), kv_storage)
        self._clock = clock or SystemClock()
        self._batch = InputBatch(
            block_size=kv_storage.block_size,
            num_blocks=kv_storage.num_blocks,
            dtype=kv_storage.dtype,
            sliding_window=model.config.sliding_window,
            device=model.device,
        )

    @property
    def num_requests(self) -> int:
        """Requests known now."""
        return len(self._batch)

    @property
    def handles(self) -> tuple[Handle, ...]:
        """Those requests."""
        return self._batch.handles

    def reset(self) -> None:
        """Forget every request; their blocks may then be given to others."""
        self._batch.clear()

    def execute(self, plan: BatchPlan) -> StepResult:
        """Run one step.

        Returns:
            The tokens of the sampling rows, and an error for each sampling row that has none.

        Raises:
            InvariantError: the plan breaks a law; nothing was changed.
            EngineError: STEP_FAILED: the device failed; the requests of the plan's rows cannot go on.
        """
        started_s = self._clock.monotonic_s()
        self._check(plan)
        self._batch.apply(plan)
        failed_before = self._batch.failed_handles(plan.rows)
        try:
            self._host_tier.copy(plan.block_copies)
            self._poison_fresh_slots(plan)
            inputs = self._batch.prepare(plan.rows)
            prepared_s = self._clock.monotonic_s()
            logits = self._forward(inputs) if inputs else None
            forwarded_s = self._clock.monotonic_s()
            outcomes = sample(logits, inputs.sampling_rows) if inputs and logits is not None else []
        except Exception as error:
            self._batch.fail(row.handle for row in plan.rows)
            raise _step_failure(plan, error) from error
        sampled = tuple(outcome for outcome in outcomes if isinstance(outcome, SampledToken))
        row_errors = tuple(outcome for outcome in outcomes if isinstance(outcome, RowError))
        self._batch.advance(plan.rows, sampled)
        self._batch.fail(error.handle for error in row_errors)
        timings = StepTimings(
            prepare_s=prepared_s - started_s,
            forward_s=forwarded_s - prepared_s,
            sample_s=self._clock.monotonic_s() - forwarded_s,
        )
        return StepResult(plan.plan_id, sampled, timings, row_errors + _errors_of_failed_requests(failed_before))

    def _check(self, plan: BatchPlan) -> None:
        num_tokens = sum(row.num_scheduled_tokens for row in plan.rows)
        require(
            num_tokens <= self._max_num_batched_tokens,
            "a plan exceeds max_num_batched_tokens",
            plan_id=plan.plan_id,
            num_tokens=num_tokens,
            max_num_batched_tokens=self._max_num_batched_tokens,
        )
        self._host_tier.check(plan.block_copies)
        self._batch.check(plan)

    def _poison_fresh_slots(self, plan: BatchPlan) -> None:
        for request in plan.new_requests:
            self._kv_storage.poison(request.block_ids, num_kept_slots=request.num_computed_tokens)
        for row in plan.rows:
            self._kv_storage.poison(row.new_block_ids)

    def _forward(self, inputs: StepInputs) -> torch.Tensor | None:
        """Run the model; return the logits of the sampling rows, if there are any."""
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._kv_storage.layers, inputs.attention)
        if not inputs.sampling_rows:
            return None
        return self._model.compute_logits(hidden.index_select(0, inputs.sampled_tokens))


def _step_failure(plan: BatchPlan, error: Exception) -> EngineError:
    if isinstance(error, InvariantError):
        return error
    return EngineError(
        ErrorReason.STEP_FAILED,
        f"Step {plan.plan_id} failed on the device: {type(error).__name__}: {error}",
        plan_id=str(plan.plan_id),
    )


def _errors_of_failed_requests(handles: Sequence[Handle]) -> tuple[RowError, ...]:
    return tuple(RowError(handle, "The request failed in an earlier step.") for handle in handles)
