"""The wire adapter towards gateways: one stream carries all requests of one gateway.

Owns: the events that wait for each gateway's stream. Guarantees: at most one message a step and gateway; events of one
request that wait are merged, so a slow gateway costs memory for token ids only; a refused submission is answered by an
error event and harms no other request.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.common.errors import EngineError, ErrorReason
from services.common.rpc.outbox import Outbox
from services.common.rpc.server import RpcServer
from services.common.rpc.status import to_status
from services.common.rpc.streams import serve_exchange
from services.scheduler.core.batch_plan import SamplingParams
from services.scheduler.core.events import Finish, FinishReason, RequestEvent
from services.scheduler.core.submission import PriorityClass, Submission
from services.scheduler.engine_loop import EngineLoop
from services.scheduler.plan_log.recording import Recorder
from services.scheduler.timeline_wire import to_explain_response
from services.scheduler.worker_roster import ServedModel
from treadle.common.v1 import generation_pb2
from treadle.scheduler.v1 import scheduler_admin_service_pb2 as admin_pb2
from treadle.scheduler.v1 import scheduler_admin_service_pb2_grpc as admin_grpc
from treadle.scheduler.v1 import scheduler_service_pb2 as pb2
from treadle.scheduler.v1 import scheduler_service_pb2_grpc as pb2_grpc

_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
}
_PRIORITIES = {
    generation_pb2.PRIORITY_CLASS_UNSPECIFIED: PriorityClass.NORMAL,
    generation_pb2.PRIORITY_CLASS_VIP: PriorityClass.VIP,
    generation_pb2.PRIORITY_CLASS_NORMAL: PriorityClass.NORMAL,
    generation_pb2.PRIORITY_CLASS_BATCH: PriorityClass.BATCH,
}


class GatewayStream:
    """Implements ``ports.GatewayPort``: what waits to be written to one gateway.

    Bound: one event a live request, whose tokens are bounded by its ``max_tokens``.
    """

    def __init__(self, scheduler_epoch: int, recorder: Recorder) -> None:
        self._scheduler_epoch = scheduler_epoch
        self._recorder = recorder
        self._events: dict[str, pb2.RequestEvent] = {}
        self._models: list[ServedModel] | None = None
        self._weight_version = ""
        self.outbox: Outbox[pb2.ConnectResponse] = Outbox(self._take)

    def deliver(self, event: RequestEvent) -> None:
        """Queue news of one request, merged with what waits already."""
        waiting = self._events.get(event.request_id)
        if waiting is None or waiting.HasField("finish") or waiting.HasField("error"):
            # An id may begin a new life while the end of the old one waits; then both must be told, in order.
            key = event.request_id if waiting is None else f"{event.request_id}\n{len(self._events)}"
            waiting = pb2.RequestEvent(request_id=event.request_id, seq=event.seq, weight_version=self._weight_version)
            self._events[key] = waiting
        waiting.token_ids.extend(event.token_ids)
        if event.finish is not None:
            _set_finish(waiting, event.finish)
            self._recorder.request_ended(event, waiting.finish if waiting.HasField("finish") else None)
        self.outbox.notify()

    def refuse(self, request_id: str, error: EngineError) -> None:
        """Queue the refusal of a submission."""
        event = pb2.RequestEvent(request_id=request_id)
        event.error.CopyFrom(to_status(error))
        self._recorder.request_refused(request_id, error)
        self._events[f"{request_id}\n{len(self._events)}"] = event
        self.outbox.notify()

    def tell_models(self, models: list[ServedModel]) -> None:
        """Queue the list of served models."""
        self._models = models
        self._weight_version = models[0].weight_version if len(models) == 1 else ""
        self.outbox.notify()

    def _take(self) -> pb2.ConnectResponse | None:
        if not self._events and self._models is None:
            return None
        response = pb2.ConnectResponse(scheduler_epoch=self._scheduler_epoch, events=self._events.values())
        self._events.clear()
        if self._models is not None:
            response.has_served_models = True
            for model in self._models:
                response.served_models.add(
                    name=model.name,
                    weight_version=model.weight_version,
                    max_model_len=model.max_model_len,
                    max_request_tokens=model.max_request_tokens,
                )
            self._models = None
        return response


class SchedulerServicer(pb2_grpc.SchedulerServiceServicer):
    """Serves ``treadle.scheduler.v1.SchedulerService`` from an engine loop."""

    def __init__(self, engine: EngineLoop, epoch: int, recorder: Recorder) -> None:
        self._engine = engine
        self._epoch = epoch
        self._recorder = recorder
        self._streams: set[GatewayStream] = set()

    def register_on(self, server: RpcServer) -> None:
        """Serve on ``server``, and let its reflection tell so."""
        pb2_grpc.add_SchedulerServiceServicer_to_server(self, server.server)
        server.add_service_names([pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name])

    def tell_models(self) -> None:
        """Tell every gateway which models are served now."""
        for stream in self._streams:
            stream.tell_models(self._engine.served_models())

    async def Connect(
        self, request_iterator: AsyncIterator[pb2.ConnectRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve the requests of one gateway until it goes away; then abort them."""
        gateway = await _read_hello(request_iterator)
        stream = GatewayStream(self._epoch, self._recorder)
        self._engine.gateway_up(gateway, stream)
        self._streams.add(stream)
        try:
            hello = pb2.SchedulerHello(scheduler_epoch=self._epoch)
            await context.write(pb2.ConnectResponse(hello=hello, scheduler_epoch=self._epoch))
            stream.tell_models(self._engine.served_models())
            await serve_exchange(
                context, request_iterator, stream.outbox, lambda request: self._receive(gateway, stream, request)
            )
        finally:
            self._streams.discard(stream)
            self._engine.gateway_down(gateway, stream)

    async def GetLoad(self, request: pb2.GetLoadRequest, context: object) -> pb2.GetLoadResponse:  # noqa: ARG002
        """Return the figures of the scheduler."""
        load = self._engine.core.load()
        epochs = {name: info.epoch for name, info in self._engine.worker_infos().items()}
        response = pb2.GetLoadResponse(
            num_waiting=load.num_waiting + self._engine.num_held,
            num_running=load.num_running,
            num_preemptions=load.num_preemptions,
            num_steps=load.num_steps,
            num_drafted_by_place=load.num_drafted_by_place,
            num_accepted_by_place=load.num_accepted_by_place,
        )
        for worker in load.workers:
            response.workers.add(
                name=worker.worker,
                worker_epoch=epochs.get(worker.worker, 0),
                num_running=worker.num_running,
                num_in_flight_plans=worker.num_in_flight_plans,
                is_draining=worker.is_draining,
            )
        return response

    async def Explain(self, request: pb2.ExplainRequest, context: object) -> pb2.ExplainResponse:  # noqa: ARG002
        """Return the timelines of a request and its choices."""
        tenant = request.tenant if request.HasField("tenant") else None
        return to_explain_response(self._engine.explain(request.request_id, tenant), self._epoch)

    def _receive(self, gateway: str, stream: GatewayStream, request: pb2.ConnectRequest) -> None:
        for submission in request.submissions:
            self._recorder.request_arrived(gateway, submission)
            try:
                self._engine.submit(_from_submission(submission, gateway))
            except EngineError as error:
                stream.refuse(submission.request_id, error)
        for request_id in request.cancel_request_ids:
            self._recorder.request_cancelled(request_id)
            self._engine.cancel(request_id)


class SchedulerAdminServicer(admin_grpc.SchedulerAdminServiceServicer):
    """Serves ``treadle.scheduler.v1.SchedulerAdminService``: what operators ask."""

    def __init__(self, engine: EngineLoop, epoch: int) -> None:
        self._engine = engine
        self._epoch = epoch

    def register_on(self, server: RpcServer) -> None:
        """Serve on ``server``, and let its reflection tell so."""
        admin_grpc.add_SchedulerAdminServiceServicer_to_server(self, server.server)
        server.add_service_names([admin_pb2.DESCRIPTOR.services_by_name["SchedulerAdminService"].full_name])

    async def ListHandles(
        self,
        request: admin_pb2.ListHandlesRequest,  # noqa: ARG002
        context: object,  # noqa: ARG002
    ) -> admin_pb2.ListHandlesResponse:
        """Return every handle that may still be spoken of."""
        handles = self._engine.core.list_handles()
        response = admin_pb2.ListHandlesResponse(
            scheduler_epoch=self._epoch, leaving_handles=handles.leaving, unsettled_pools=handles.unsettled_pools
        )
        for worker in handles.workers:
            message = response.workers.add(
                worker=worker.worker, worker_epoch=worker.worker_epoch, admitting_handles=worker.admitting
            )
            for handle, request_id in worker.running:
                message.running.add(handle=handle, request_id=request_id)
        return response


async def _read_hello(request_iterator: AsyncIterator[pb2.ConnectRequest]) -> str:
    async for request in request_iterator:
        if request.HasField("hello") and request.hello.gateway:
            # Two processes of one name are two gateways: neither may take the other's events.
            return f"{request.hello.gateway}/{request.hello.gateway_epoch:x}"
        break
    raise EngineError(ErrorReason.INVALID_REQUEST, "The first message must carry a hello with a name.", field="hello")


def _from_submission(submission: pb2.Submission, gateway: str) -> Submission:
    if submission.resume_from_seq != len(submission.output_token_ids):
        text = "resume_from_seq must equal the number of output_token_ids"
        raise EngineError(ErrorReason.INVALID_REQUEST, text, field="resume_from_seq")
    priority = _PRIORITIES.get(submission.priority)
    if priority is None:
        raise EngineError(ErrorReason.INVALID_REQUEST, "priority is no class that exists", field="priority")
    sampling = submission.sampling
    if not sampling.HasField("seed"):
        raise EngineError(ErrorReason.INVALID_REQUEST, "sampling.seed is required", field="sampling.seed")
    return Submission(
        request_id=submission.request_id,
        gateway=gateway,
        tenant=submission.tenant,
        cache_scope=submission.cache_scope,
        model=submission.model,
        prompt_token_ids=tuple(submission.prompt_token_ids),
        output_token_ids=tuple(submission.output_token_ids),
        max_tokens=submission.max_tokens,
        min_tokens=submission.min_tokens,
        eos_token_ids=tuple(submission.eos_token_ids),
        stop_token_ids=tuple(submission.stop_token_ids),
        sampling=SamplingParams(
            temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
            top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            sample_index=submission.sample_index,
        ),
        leader_request_id=submission.leader_request_id or None,
        is_max_tokens_implied=submission.is_max_tokens_implied,
        priority=priority,
        deadline_ms=submission.deadline_unix_ms if submission.HasField("deadline_unix_ms") else None,
        is_resumable=submission.is_resumable,
    )


def _set_finish(event: pb2.RequestEvent, finish: Finish) -> None:
    if finish.error is not None:
        event.error.CopyFrom(to_status(finish.error))
        return
    event.finish.reason = _FINISH_REASONS[finish.reason]
    if finish.stop_token_id is not None:
        event.finish.stop_token_id = finish.stop_token_id
    event.finish.usage.num_prompt_tokens = finish.num_prompt_tokens
    event.finish.usage.num_output_tokens = finish.num_output_tokens
    event.finish.usage.num_cached_tokens = finish.num_cached_tokens
    event.finish.usage.num_draft_tokens = finish.num_draft_tokens
    event.finish.usage.num_accepted_tokens = finish.num_accepted_tokens
