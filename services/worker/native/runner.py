"""Executes batch plans on the native engine: check, learn, draft, one native call, verify, record.

Owns: the engine's model, the KV cache and the requests; used by one thread. Guarantees: those of ``StepRunner`` as
``services.worker.model_runner`` gives them: plans take effect strictly in order; a plan that breaks a law changes
nothing; a step that fails makes the requests of its rows unusable.
"""

from collections.abc import Callable, Iterable, Sequence
from time import thread_time

import numpy as np
import numpy.typing as npt

from services.common.clock import Clock, SystemClock
from services.common.errors import EngineError, ErrorReason
from services.common.verify import require
from services.worker.host_codec import PlainCodec
from services.worker.host_tier import Bytes, HostTier
from services.worker.native.drafter import Drafter, verify
from services.worker.native.fresh_blocks import FreshBlocks
from services.worker.native.request_table import RequestTable
from services.worker.native.step_arrays import Drafts, PlannedRows, StepArrays
from services.worker.plan import BatchPlan, BlockId, Handle, RowDraft, RowError, SampledToken, StepResult, StepTimings
from treadle_kernels.cpu import CpuModel, KvCache
from treadle_kernels.cpu.sampling import NOT_FINITE

LogitsObserver = Callable[[Sequence[Handle], npt.NDArray[np.float32]], None]
"""Told, for each token that counts of a step, whose it is and its logits, ``[num_tokens, vocab_size]``; for tests."""

_POISON = 0xFF
"""Filled into every byte, NaN in bfloat16 and float32, and in the float32 scales of int8."""


class KvBlocks:
    """The engine's blocks as bytes; implements ``host_tier.BlockMemory``."""

    def __init__(self, cache: KvCache) -> None:
        self._memory = cache.memory
        self.num_blocks = cache.num_blocks

    def read_blocks(self, block_ids: Sequence[BlockId]) -> Bytes:
        """Return what blocks hold, ``[len(block_ids), bytes_per_block]``."""
        return self._memory[list(block_ids)]

    def write_blocks(self, block_ids: Sequence[BlockId], content: Bytes) -> None:
        """Write what ``read_blocks`` returned."""
        self._memory[list(block_ids)] = content


class NativeRunner:
    """One model on the CPU engine; a ``device_executor.StepRunner``.

    Args:
        model: Ready to run; its ``max_num_tokens`` bounds a step.
        cache: Keys and values, of the model's shape.
        max_positions: Positions that a request may have.
        host_tier: Over the blocks of the same cache; None: there is none.
        is_poisoned: Fill blocks with NaN before a request gets them (debugging).
        drafter: Guesses tokens where a plan allows it; None: nothing is guessed.
        clock: Times a step.
        observe_logits: Sees the logits that every token was chosen from.
    """

    def __init__(
        self,
        model: CpuModel,
        cache: KvCache,
        *,
        max_positions: int,
        host_tier: HostTier | None = None,
        is_poisoned: bool = False,
        drafter: Drafter | None = None,
        clock: Clock | None = None,
        observe_logits: LogitsObserver | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._fresh_blocks = FreshBlocks(cache)
        self._fresh_blocks.start()
        self._host_tier = host_tier or HostTier(0, PlainCodec(0), KvBlocks(cache))
        self._is_poisoned = is_poisoned
        self._drafter = drafter
        self._clock = clock or SystemClock()
        self._observe_logits = observe_logits
        self._requests = RequestTable(
            block_size=cache.shape.block_size,
            num_blocks=cache.num_blocks,
            vocab_size=model.shape.vocab_size,
            max_positions=max_positions,
        )

    @property
    def num_requests(self) -> int:
        """Requests known now."""
        return len(self._requests)

    @property
    def handles(self) -> tuple[Handle, ...]:
        """Those requests."""
        return self._requests.handles

    def reset(self) -> None:
        """Forget every request; their blocks may then be given to others."""
        self._requests.clear()
        if self._drafter is not None:
            self._drafter.clear()

    def execute(self, plan: BatchPlan) -> StepResult:
        """Run one step.

        Returns:
            The tokens of the sampling rows, and an error for each sampling row that failed. The step's time is the
            forward pass's: the engine samples in the same call.

        Raises:
            InvariantError: the plan breaks a law; nothing was changed.
            EngineError: STEP_FAILED: the engine failed; the requests of the plan's rows cannot go on.
        """
        started_s = self._clock.monotonic_s()
        self._check_budget(plan)
        self._host_tier.check(plan.block_copies)
        rows, failed_before = self._requests.take(plan)
        drafts = self._draft(plan, rows)
        try:
            self._host_tier.copy(plan.block_copies)
            if self._is_poisoned:
                self._poison_fresh_blocks(plan)
            arrays = self._requests.step_arrays(rows, drafts)
            prepared_s = self._clock.monotonic_s()
            begin_cpu_s = thread_time()
            sampled, logits = self._run(arrays)
            engine_cpu_s = thread_time() - begin_cpu_s
        except Exception as error:
            self._requests.fail([row.handle for row in plan.rows])
            text = f"Step {plan.plan_id} failed on the device: {type(error).__name__}: {error}"
            raise EngineError(ErrorReason.STEP_FAILED, text, plan_id=str(plan.plan_id)) from error
        handles, positions = rows.sampling_handles, arrays.sampling["position"]
        if drafts is None:
            self._requests.advance(rows, sampled)
        else:
            verdict = verify(drafts, sampled)
            self._requests.advance(rows, verdict.last_tokens(sampled), verdict.num_tokens)
            sampled, positions = sampled[verdict.kept], positions[verdict.kept]
            logits = None if logits is None else logits[verdict.kept]
            handles = [handle for handle, count in zip(handles, verdict.num_tokens, strict=True) for _ in range(count)]
        self._fresh_blocks.note_used(plan)
        if self._observe_logits is not None and logits is not None:
            self._observe_logits(handles, logits)
        tokens, errors = self._outcomes(handles, positions, sampled)
        if self._drafter is not None:
            self._drafter.note_sampled(tokens)
        errors += [RowError(handle, "The request failed in an earlier step.") for handle in failed_before]
        timings = StepTimings(prepared_s - started_s, self._clock.monotonic_s() - prepared_s, 0.0, engine_cpu_s)
        return StepResult(plan.plan_id, tuple(tokens), timings, tuple(errors), _row_drafts(rows, drafts))

    def _draft(self, plan: BatchPlan, rows: PlannedRows) -> Drafts | None:
        if self._drafter is None:
            return None
        self._drafter.take(plan)
        return self._drafter.draft(rows)

    def _check_budget(self, plan: BatchPlan) -> None:
        num_tokens = sum([row.num_scheduled_tokens + row.max_draft_tokens for row in plan.rows])
        limit = self._model.shape.max_num_tokens
        text = "a plan exceeds max_num_batched_tokens"
        if num_tokens > limit:
            require(False, text, plan_id=plan.plan_id, num_tokens=num_tokens, max_num_batched_tokens=limit)

    def _run(self, arrays: StepArrays) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32] | None]:
        """Run the rows; return the sampled tokens, and what they were chosen from if somebody wants to see it."""
        logits = None
        if self._observe_logits is not None:
            logits = np.empty((len(arrays.sampling), self._model.shape.vocab_size), dtype=np.float32)
        with self._fresh_blocks.step():
            return self._model.step(self._cache, arrays.rows, arrays.token_ids, arrays.sampling, logits), logits

    def _outcomes(
        self, handles: Iterable[Handle], positions: npt.NDArray[np.uint64], sampled: npt.NDArray[np.int32]
    ) -> tuple[list[SampledToken], list[RowError]]:
        """Turn the tokens that count into results; rows that end without one have failed."""
        outcomes = zip(handles, sampled.tolist(), strict=True)
        tokens = [SampledToken(handle, token_id) for handle, token_id in outcomes]
        if not (sampled == NOT_FINITE).any():
            return tokens, []
        errors = [
            RowError(token.handle, f"The model's logits at output position {position} are not finite.")
            for token, position in zip(tokens, positions.tolist(), strict=True)
            if token.token_id == NOT_FINITE
        ]
        self._requests.fail([error.handle for error in errors])
        return [token for token in tokens if token.token_id != NOT_FINITE], errors

    def _poison_fresh_blocks(self, plan: BatchPlan) -> None:
        block_size = self._cache.shape.block_size
        for request in plan.new_requests:
            # The block in which a prefix hit ends is left whole: the inside of a block is the engine's affair.
            num_kept = -(-request.num_computed_tokens // block_size)
            self._cache.memory[list(request.block_ids[num_kept:])] = _POISON
        for row in plan.rows:
            self._cache.memory[list(row.new_block_ids)] = _POISON


def _row_drafts(rows: PlannedRows, drafts: Drafts | None) -> tuple[RowDraft, ...]:
    if drafts is None:
        return ()
    drafted = zip(rows.sampling_handles, drafts, strict=True)
    return tuple(RowDraft(handle, len(draft)) for handle, draft in drafted if draft)
