"""The scheduler's links to workers and to the KV-cache manager, each one stream that is kept up for ever.

Owns: the streams and the hash chain of the plans. Guarantees: the engine loop hears of a peer only between its greeting
and the end of its stream, so a peer's life and its use never overlap wrongly.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable

from services.common.errors import EngineError, ErrorReason
from services.common.rpc.channel import open_channel
from services.common.rpc.outbox import Outbox
from services.common.rpc.streams import exchange, open_stream, read_greeting, write_message
from services.common.tasks import Backoff, keep_up
from services.scheduler.core.batch_plan import BatchPlan
from services.scheduler.core.host_tier import HostTierFacts, HostTierUse, num_useful_host_blocks
from services.scheduler.core.kv_messages import (
    AdmitGranted,
    BlockCopy,
    CopyDirection,
    DenialReason,
    Denied,
    KVMessage,
    KVReply,
    ReserveGranted,
)
from services.scheduler.core.lane import WorkerInfo
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.engine_loop import EngineLoop
from services.scheduler.plan_log.recording import Recorder
from services.scheduler.plan_wire import from_step_result, to_batch_plan
from treadle.kv_cache.v1 import block_pb2, kv_cache_service_pb2, kv_cache_service_pb2_grpc
from treadle.worker.v1 import worker_service_pb2, worker_service_pb2_grpc

logger = logging.getLogger(__name__)

_COPY_DIRECTION_BY_NUMBER = {
    int(block_pb2.COPY_DIRECTION_TO_HOST): CopyDirection.TO_HOST,
    int(block_pb2.COPY_DIRECTION_TO_DEVICE): CopyDirection.TO_DEVICE,
}

_DENIAL_REASON_BY_NUMBER = {
    int(kv_cache_service_pb2.DENIAL_REASON_TENANT_LIMIT): DenialReason.TENANT_LIMIT,
    int(kv_cache_service_pb2.DENIAL_REASON_NEVER_FITS): DenialReason.NEVER_FITS,
}


class KVCacheLink:
    """Implements ``ports.KVCachePort``."""

    def __init__(self, address: str, engine: EngineLoop, epoch: int) -> None:
        self._address = address
        self._engine = engine
        self._epoch = epoch
        # Bound: the core has one message in flight at most.
        self._messages: deque[kv_cache_service_pb2.SessionRequest] = deque()
        self._outbox = Outbox(lambda: self._messages.popleft() if self._messages else None)

    def send_message(self, message: KVMessage) -> None:
        """Queue a message."""
        self._messages.append(_to_session_request(message))
        self._outbox.notify()

    async def run(self) -> None:
        """Keep the session up until cancelled."""
        await keep_up("kv_cache", self._live, Backoff())

    async def _live(self, on_up: Callable[[], None]) -> None:
        unavailable = ErrorReason.KV_CACHE_UNAVAILABLE
        async with open_channel(self._address) as channel:
            stub = kv_cache_service_pb2_grpc.KVCacheServiceStub(channel)
            async with open_stream(lambda: stub.Session()) as call:
                hello = kv_cache_service_pb2.SchedulerHello(scheduler_epoch=self._epoch)
                await write_message(call, kv_cache_service_pb2.SessionRequest(hello=hello), unavailable)
                await read_greeting(call, unavailable)
                on_up()
                self._messages.clear()
                self._engine.kv_cache_up(self)
                try:
                    await exchange(call, self._outbox, self._receive, unavailable)
                finally:
                    self._engine.kv_cache_down()

    def _receive(self, response: kv_cache_service_pb2.SessionResponse) -> None:
        self._engine.kv_reply(_from_session_response(response))


class WorkerLink:
    """Implements ``ports.WorkerPort``."""

    def __init__(
        self,
        name: str,
        address: str,
        engine: EngineLoop,
        epoch: int,
        limits: SchedulerLimits,
        recorder: Recorder,
        host_tier_use: HostTierUse = "auto",
    ) -> None:
        self._name = name
        self._address = address
        self._engine = engine
        self._epoch = epoch
        self._run_ahead_depth = limits.run_ahead_depth
        self._max_num_batched_tokens = limits.max_num_batched_tokens
        self._recorder = recorder
        self._host_tier_use = host_tier_use
        self._log_stream = 0
        self._prev_hash = b""
        # Bound: the core plans run_ahead_depth steps at most, and one message may follow the last.
        self._plans: deque[worker_service_pb2.RunStepsRequest] = deque()
        self._outbox = Outbox(lambda: self._plans.popleft() if self._plans else None)

    def send_plan(self, plan: BatchPlan) -> None:
        """Queue a plan, chained to the one before it."""
        message = to_batch_plan(plan, self._epoch)
        message.prev_hash = self._prev_hash
        self._prev_hash = hashlib.blake2b(message.SerializeToString(deterministic=True), digest_size=16).digest()
        self._recorder.plan_sent(self._log_stream, message)
        self._plans.append(worker_service_pb2.RunStepsRequest(plan=message))
        self._outbox.notify()

    def send_drained(self) -> None:
        """Queue the last message, upon which the worker ends the stream."""
        self._plans.append(worker_service_pb2.RunStepsRequest(drained=worker_service_pb2.Drained()))
        self._outbox.notify()

    async def run(self) -> None:
        """Keep the stream up until cancelled."""
        await keep_up(self._name, self._live, Backoff())

    async def _live(self, on_up: Callable[[], None]) -> None:
        unavailable = ErrorReason.WORKER_UNAVAILABLE
        async with open_channel(self._address) as channel:
            stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
            async with open_stream(lambda: stub.RunSteps()) as call:
                hello = worker_service_pb2.Hello(scheduler_epoch=self._epoch, run_ahead_depth=self._run_ahead_depth)
                await write_message(call, worker_service_pb2.RunStepsRequest(hello=hello), unavailable)
                greeting = await read_greeting(call, unavailable)
                info = self._worker_info(greeting)
                on_up()
                self._plans.clear()
                self._prev_hash = b""
                self._log_stream = self._recorder.worker_started(greeting.capabilities)
                self._engine.worker_up(info, self)
                logger.info("worker is up", extra={"fields": {"worker": self._name, "epoch": info.epoch}})
                try:
                    await exchange(call, self._outbox, self._receive, unavailable)
                except EngineError as error:
                    if error.reason is ErrorReason.STEP_FAILED and "plan_id" in error.metadata:
                        plan_id = int(error.metadata["plan_id"])
                        self._recorder.plan_failed(self._log_stream, plan_id, error.message)
                        self._engine.step_failed(self._name, plan_id, error.message)
                    raise
                finally:
                    self._recorder.worker_ended(self._log_stream)
                    self._engine.worker_down(self._name)

    def _worker_info(self, greeting: worker_service_pb2.RunStepsResponse) -> WorkerInfo:
        if greeting.WhichOneof("message") != "capabilities":
            raise EngineError(ErrorReason.WORKER_UNAVAILABLE, "the worker did not begin with its capabilities")
        capabilities = greeting.capabilities
        if capabilities.name != self._name:
            text = f"expected {self._name} at {self._address}, found {capabilities.name}"
            raise EngineError(ErrorReason.WORKER_UNAVAILABLE, text, worker=self._name, address=self._address)
        if capabilities.max_num_batched_tokens < self._max_num_batched_tokens:
            text = (
                f"{self._name} takes {capabilities.max_num_batched_tokens} tokens a step, the scheduler plans up to "
                f"{self._max_num_batched_tokens}; give both the same max_num_batched_tokens"
            )
            raise EngineError(ErrorReason.INVALID_CONFIG, text, field="max_num_batched_tokens")
        facts = HostTierFacts(
            capabilities.num_host_blocks, capabilities.block_restore_us, capabilities.token_prefill_us
        )
        num_host_blocks = num_useful_host_blocks(facts, capabilities.block_size, self._host_tier_use)
        if facts.num_host_blocks:
            fields = {"worker": self._name, "restore_us": facts.block_restore_us, "prefill_us": facts.token_prefill_us}
            logger.info("host tier of %d blocks is used", num_host_blocks, extra={"fields": fields})
        return WorkerInfo(
            name=capabilities.name,
            epoch=capabilities.worker_epoch,
            num_blocks=capabilities.num_blocks,
            block_size=capabilities.block_size,
            max_model_len=capabilities.max_model_len,
            model=capabilities.model,
            weight_version=capabilities.weight_version,
            num_host_blocks=num_host_blocks,
            max_draft_tokens=capabilities.max_draft_tokens,
        )

    def _receive(self, response: worker_service_pb2.RunStepsResponse) -> None:
        if response.WhichOneof("message") == "draining":
            logger.info("worker is draining", extra={"fields": {"worker": self._name}})
            self._engine.worker_draining(self._name)
            return
        result = response.result
        self._recorder.result_received(self._log_stream, result)
        self._engine.step_result(self._name, from_step_result(result))


def _to_session_request(message: KVMessage) -> kv_cache_service_pb2.SessionRequest:
    request = kv_cache_service_pb2.SessionRequest(
        sequence=message.sequence, close_pools=message.close_pools, release_handles=message.releases
    )
    for spec in message.open_pools:
        request.open_pools.add(
            pool=spec.pool,
            num_blocks=spec.num_blocks,
            block_size=spec.block_size,
            model=spec.model,
            weight_version=spec.weight_version,
            num_host_blocks=spec.num_host_blocks,
            worker_epoch=spec.worker_epoch,
        )
    for commit in message.commits:
        request.commits.add(
            handle=commit.handle, num_computed_tokens=commit.num_computed_tokens, token_ids=commit.token_ids
        )
    for reserve in message.reserves:
        request.reserves.add(handle=reserve.handle, num_blocks=reserve.num_blocks)
    for admit in message.admits:
        request.admits.add(
            handle=admit.handle,
            pool=admit.pool,
            cache_scope=admit.cache_scope,
            token_ids=admit.token_ids,
            num_tokens=admit.num_tokens,
            request_id=admit.request_id,
            tenant=admit.tenant,
            max_num_tokens=admit.max_num_tokens,
            is_reserved_only=admit.is_reserved_only,
        )
    return request


def _from_session_response(response: kv_cache_service_pb2.SessionResponse) -> KVReply:
    return KVReply(
        sequence=response.sequence,
        pool_epochs=tuple((opened.pool, opened.block_epoch) for opened in response.opened_pools),
        admitted=tuple(
            AdmitGranted(
                admitted.handle,
                admitted.block_table.block_epoch,
                tuple(admitted.block_table.block_ids),
                admitted.num_cached_tokens,
            )
            for admitted in response.admitted
        ),
        reserved=tuple(
            ReserveGranted(reserved.handle, tuple(reserved.added_blocks.block_ids)) for reserved in response.reserved
        ),
        denied=tuple(
            Denied(
                denied.handle,
                denied.num_blocks_free,
                denied.num_blocks_needed,
                _DENIAL_REASON_BY_NUMBER.get(denied.reason, DenialReason.CAPACITY),
                tuple(denied.reclaim_handles),
            )
            for denied in response.denied
        ),
        block_copies=tuple(
            (
                in_pool.pool,
                tuple(
                    BlockCopy(_COPY_DIRECTION_BY_NUMBER[copy.direction], copy.block_id, copy.host_slot)
                    for copy in in_pool.copies
                ),
            )
            for in_pool in response.block_copies
        ),
        pool_owners=tuple((news.pool, tuple(news.tenants)) for news in response.pool_owners),
    )
