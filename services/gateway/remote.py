"""The scheduler behind the gateway's port: one gRPC stream that carries all requests and is kept up for ever.

Owns: the link, the live requests of this gateway with their journals, and the mirror of what the scheduler last said
(models, health). Guarantees: one message up and one down a step, whatever the number of requests; when the scheduler
dies, every live request is submitted again with the tokens that arrived, so that its reader sees a pause and nothing
else; when no scheduler came back within ``resume_timeout_s``, live requests end with SCHEDULER_UNAVAILABLE.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.clock import Clock
from services.common.errors import EngineError, ErrorReason, InvariantError
from services.common.rpc.channel import open_channel
from services.common.rpc.outbox import Outbox
from services.common.rpc.status import from_rpc_error, from_status
from services.common.rpc.streams import exchange, open_stream, read_greeting, write_message
from services.common.tasks import Backoff, keep_up
from services.gateway.journal import StreamJournal
from services.gateway.ports import (
    CHOICE_SEPARATOR,
    Finish,
    FinishReason,
    Priority,
    SchedulerRequest,
    ServedModel,
    TokenEvent,
)
from services.gateway.timeline import RequestTimeline
from services.gateway.timeline_wire import from_explain_response
from treadle.common.v1 import generation_pb2, sampling_pb2
from treadle.scheduler.v1 import scheduler_service_pb2 as pb2
from treadle.scheduler.v1 import scheduler_service_pb2_grpc as pb2_grpc

logger = logging.getLogger(__name__)

_UNAVAILABLE = ErrorReason.SCHEDULER_UNAVAILABLE
_HEALTH_INTERVAL_S = 0.5
_HEALTH_INTERVAL_UNREADY_S = 0.05
_HEALTH_TIMEOUT_S = 1.0
_EXPLAIN_TIMEOUT_S = 1.0
_LEAVING_TIMEOUT_S = 2.0
_MAX_MESSAGE_TOKENS = 1_000_000
"""Tokens after which the rest of the submissions travels in a further message; far below the limit of a message."""

_PRIORITIES = {
    Priority.VIP: generation_pb2.PRIORITY_CLASS_VIP,
    Priority.NORMAL: generation_pb2.PRIORITY_CLASS_NORMAL,
    Priority.BATCH: generation_pb2.PRIORITY_CLASS_BATCH,
}
_FINISH_REASONS = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}


class RemoteGeneration:
    """One live request; implements ``ports.Generation``."""

    def __init__(self, scheduler: "RemoteScheduler", request: SchedulerRequest) -> None:
        self._scheduler = scheduler
        self.request = request
        self.journal = StreamJournal()

    async def __aenter__(self) -> Self:
        """Submit the request, once an earlier one of the same id that was left has ended at the scheduler."""
        await self._scheduler.until_free(self.request.request_id)
        self._scheduler.submit(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the request unless it has ended."""
        self._scheduler.forget(self)

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> TokenEvent:
        """Wait for the next event."""
        return await self.journal.read()


class RemoteScheduler:
    """Implements ``ports.SchedulerPort`` over gRPC.

    Args:
        address: Of the scheduler, ``unix:PATH`` or ``HOST:PORT``.
        gateway: Name of this gateway.
        epoch: Life of this gateway.
        resume_timeout_s: How long live requests wait for a scheduler that is gone.
        clock: Source of the time at which a model was first seen.
    """

    def __init__(self, address: str, gateway: str, epoch: int, resume_timeout_s: float, clock: Clock) -> None:
        self._address = address
        self._gateway = gateway
        self._epoch = epoch
        self._resume_timeout_s = resume_timeout_s
        self._clock = clock
        self._live: dict[str, RemoteGeneration] = {}
        self._to_submit: dict[str, RemoteGeneration] = {}
        self._to_cancel: set[str] = set()
        # Ids whose reader has left and whose last event has not come: what still comes is not of a new life.
        self._leaving: dict[str, asyncio.Event] = {}
        self._outbox: Outbox[pb2.ConnectRequest] = Outbox(self._take_message)
        self._models: tuple[ServedModel, ...] = ()
        self._scheduler_epoch = 0
        self._is_linked = False
        self._is_serving = False
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    # -- the port

    def open_generation(self, request: SchedulerRequest) -> RemoteGeneration:
        """Return the request's generation, not yet submitted."""
        return RemoteGeneration(self, request)

    def cancel(self, request_id: str) -> bool:
        """Ask for the end of a live request; its reader gets a finish of reason CANCELLED."""
        if request_id not in self._live:
            return False
        self._to_cancel.add(request_id)
        self._outbox.notify()
        return True

    def cancel_all(self, request_id: str) -> bool:
        """Cancel a request with all its choices."""
        choices = [live for live in self._live if live.partition(CHOICE_SEPARATOR)[0] == request_id]
        for choice in choices:
            self.cancel(choice)
        return bool(choices)

    def models(self) -> tuple[ServedModel, ...]:
        """Return the served models, as the scheduler last said."""
        return self._models

    def is_ready(self) -> bool:
        """Tell whether a request submitted now can be served."""
        return not self.unready_reasons()

    def unready_reasons(self) -> tuple[str, ...]:
        """Say what readiness waits for."""
        if self._is_draining:
            return ("draining",)
        if not self._is_linked:
            return ("scheduler: not connected",)
        if not self._is_serving:
            return ("scheduler: not ready (it waits for kv_cache and a worker) or not answering",)
        return () if self._models else ("worker: no model is served yet",)

    async def explain(self, request_id: str, tenant: str) -> tuple[RequestTimeline, ...]:
        """Ask what happened to a request and its choices."""
        question = pb2.ExplainRequest(request_id=request_id, tenant=tenant)
        async with open_channel(self._address) as channel:
            try:
                response = await pb2_grpc.SchedulerServiceStub(channel).Explain(question, timeout=_EXPLAIN_TIMEOUT_S)
            except grpc.RpcError as error:
                raise from_rpc_error(error, _UNAVAILABLE) from error
        return from_explain_response(response)

    def epoch(self) -> int:
        """Return the life of the scheduler that was last heard of; 0 before the first."""
        return self._scheduler_epoch

    # -- called by RemoteGeneration

    async def until_free(self, request_id: str) -> None:
        """Wait, for a moment, until an earlier request of this id that was left has ended at the scheduler."""
        is_ended = self._leaving.get(request_id)
        if is_ended is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVING_TIMEOUT_S):
                    await is_ended.wait()

    def submit(self, generation: RemoteGeneration) -> None:
        """Queue a new request for the next message.

        Raises:
            EngineError: DRAINING, SCHEDULER_UNAVAILABLE, DUPLICATE_REQUEST.
        """
        request_id = generation.request.request_id
        if self._is_draining:
            raise EngineError(ErrorReason.DRAINING, "This gateway is stopping; try another one.")
        if not self._is_linked:
            raise EngineError(_UNAVAILABLE, "The scheduler is not connected; try again shortly.")
        if request_id in self._live or request_id in self._leaving:
            message = f"A request with id {request_id!r} is running; choose another id."
            raise EngineError(ErrorReason.DUPLICATE_REQUEST, message, field="request_id", request_id=request_id)
        self._live[request_id] = generation
        self._to_submit[request_id] = generation
        self._is_idle.clear()
        self._outbox.notify()

    def forget(self, generation: RemoteGeneration) -> None:
        """Drop a request whose reader is gone, and cancel it unless it has ended."""
        request_id = generation.request.request_id
        if self._live.get(request_id) is not generation:
            return
        del self._live[request_id]
        if not self._live:
            self._is_idle.set()
        has_left = self._to_submit.pop(request_id, None) is None
        if has_left and self._is_linked and not generation.journal.is_closed:
            self._leaving[request_id] = asyncio.Event()
            self._to_cancel.add(request_id)
            self._outbox.notify()

    # -- lifecycle

    async def run(self) -> None:
        """Keep the link and the view of the scheduler's health up until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_health(), name="gateway.scheduler_health")
            tasks.create_task(keep_up("scheduler", self._live_link, Backoff()), name="gateway.scheduler_link")
            tasks.create_task(self._expire_orphans(), name="gateway.scheduler_orphans")

    async def drain(self) -> None:
        """Refuse new requests and return when none is live; bounded by the caller."""
        self._is_draining = True
        await self._is_idle.wait()

    # -- the link

    async def _live_link(self, on_up: Callable[[], None]) -> None:
        async with open_channel(self._address) as channel:
            stub = pb2_grpc.SchedulerServiceStub(channel)
            async with open_stream(lambda: stub.Connect()) as call:
                hello = pb2.GatewayHello(gateway=self._gateway, gateway_epoch=self._epoch)
                await write_message(call, pb2.ConnectRequest(hello=hello), _UNAVAILABLE)
                self._receive(await read_greeting(call, _UNAVAILABLE))
                on_up()
                self._link_is_up()
                try:
                    await exchange(call, self._outbox, self._receive, _UNAVAILABLE)
                finally:
                    self._is_linked = False
                    for is_ended in self._leaving.values():
                        is_ended.set()  # the scheduler aborts what its broken stream carried
                    self._leaving.clear()

    def _link_is_up(self) -> None:
        """Submit every live request to the scheduler's new life, from where its journal stands."""
        self._is_linked = True
        self._to_cancel &= self._live.keys()  # of the others the new life knows nothing
        self._to_submit = {key: live for key, live in self._live.items() if not live.journal.is_closed}
        if self._to_submit:
            logger.info("resuming", extra={"fields": {"num_requests": len(self._to_submit)}})
        self._outbox.notify()

    def _take_message(self) -> pb2.ConnectRequest | None:
        if not self._to_submit and not self._to_cancel:
            return None
        message = pb2.ConnectRequest(cancel_request_ids=sorted(self._to_cancel))
        self._to_cancel.clear()
        num_tokens = 0
        while self._to_submit and num_tokens < _MAX_MESSAGE_TOKENS:
            generation = self._to_submit.pop(next(iter(self._to_submit)))
            message.submissions.append(_to_submission(generation))
            num_tokens += len(generation.request.prompt_token_ids) + generation.journal.num_tokens
        return message

    def _receive(self, message: pb2.ConnectResponse) -> None:
        self._scheduler_epoch = message.scheduler_epoch
        if message.has_served_models:
            self._mirror_models(message)
        for event in message.events:
            if event.request_id in self._leaving:
                if event.HasField("finish") or event.HasField("error"):
                    self._leaving.pop(event.request_id).set()
                continue
            generation = self._live.get(event.request_id)
            if generation is not None:
                self._record(generation, event)

    def _record(self, generation: RemoteGeneration, event: pb2.RequestEvent) -> None:
        if event.HasField("error"):
            generation.journal.fail(from_status(event.error, ErrorReason.STEP_FAILED))
            return
        try:
            generation.journal.append(event.seq, list(event.token_ids), _finish_of(event))
        except InvariantError as error:
            # Only this stream's continuation is in doubt: it must not go on, the others may.
            logger.critical("broken stream", exc_info=error, extra={"fields": {"request_id": event.request_id}})
            generation.journal.fail(error)

    def _mirror_models(self, message: pb2.ConnectResponse) -> None:
        created = {model.name: model.created_unix_s for model in self._models}
        now_s = self._clock.unix_ms() // 1000
        self._models = tuple(
            ServedModel(model.name, model.max_model_len, created.get(model.name, now_s), model.weight_version)
            for model in message.served_models
        )

    # -- what happens when the scheduler is away

    async def _watch_health(self) -> None:
        """Mirror the scheduler's own readiness; a scheduler that does not answer counts as not ready."""
        async with open_channel(self._address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="scheduler")
            while True:
                try:
                    response = await stub.Check(request, timeout=_HEALTH_TIMEOUT_S)
                    self._is_serving = response.status == health_pb2.HealthCheckResponse.SERVING
                except grpc.RpcError as error:
                    if self._is_serving:
                        reason = str(from_rpc_error(error, _UNAVAILABLE))
                        logger.warning("scheduler health", extra={"fields": {"reason": reason}})
                    self._is_serving = False
                await asyncio.sleep(_HEALTH_INTERVAL_S if self._is_serving else _HEALTH_INTERVAL_UNREADY_S)

    async def _expire_orphans(self) -> None:
        """End live requests when no scheduler took them up in time."""
        num_checks_without_link = 0
        check_interval_s = self._resume_timeout_s / 10
        while True:
            await asyncio.sleep(check_interval_s)
            num_checks_without_link = 0 if self._is_linked else num_checks_without_link + 1
            if num_checks_without_link < 10:
                continue
            for generation in self._live.values():
                generation.journal.fail(
                    EngineError(_UNAVAILABLE, "The scheduler was lost and did not come back in time; try again.")
                )


def _to_submission(generation: RemoteGeneration) -> pb2.Submission:
    request, output = generation.request, generation.journal.token_ids
    submission = pb2.Submission(
        request_id=request.request_id,
        tenant=request.tenant,
        idempotency_key=request.idempotency_key or "",
        deadline_unix_ms=request.deadline_unix_ms,
        priority=_PRIORITIES[request.priority],
        cache_scope=request.cache_scope,
        model=request.model,
        weight_version=request.weight_version,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=output,
        resume_from_seq=len(output),
        sampling=sampling_pb2.SamplingParams(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            min_p=request.sampling.min_p,
            seed=request.sampling.seed,
        ),
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        eos_token_ids=sorted(request.eos_token_ids),
        stop_token_ids=sorted(request.stop_token_ids),
        sample_index=request.sampling.sample_index,
        leader_request_id=request.leader_request_id or "",
        is_max_tokens_implied=request.is_max_tokens_implied,
    )
    return submission


def _finish_of(event: pb2.RequestEvent) -> Finish | None:
    if not event.HasField("finish"):
        return None
    finish = event.finish
    reason = _FINISH_REASONS.get(finish.reason)
    if reason is None:
        raise EngineError(ErrorReason.INVARIANT_VIOLATED, f"finish without a reason: {MessageToDict(event)}")
    return Finish(
        reason=reason,
        stop_token_id=finish.stop_token_id if finish.HasField("stop_token_id") else None,
        num_prompt_tokens=finish.usage.num_prompt_tokens,
        num_output_tokens=finish.usage.num_output_tokens,
        num_cached_tokens=finish.usage.num_cached_tokens,
        num_draft_tokens=finish.usage.num_draft_tokens,
        num_accepted_tokens=finish.usage.num_accepted_tokens,
    )
