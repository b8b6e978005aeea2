"""What operators ask a worker: which requests it knows, and to forget some that nobody else knows.

Guarantees: both take their turn on the device between two plans, so an answer is true of one moment of its order.
"""

from services.common.errors import EngineError, ErrorReason
from services.common.rpc.server import RpcServer
from services.worker.plan import BatchPlan, Handle
from services.worker.servicer.steps import WorkerServicer
from treadle.worker.v1 import worker_admin_service_pb2 as pb2
from treadle.worker.v1 import worker_admin_service_pb2_grpc as pb2_grpc

_NO_PLAN_ID = 0
"""Plans of a scheduler count from 1."""


class WorkerAdminServicer(pb2_grpc.WorkerAdminServiceServicer):
    """Serves ``treadle.worker.v1.WorkerAdminService`` beside the servicer that executes plans."""

    def __init__(self, steps: WorkerServicer) -> None:
        self._steps = steps

    def register_on(self, server: RpcServer) -> None:
        """Serve on ``server``, and let its reflection tell so."""
        pb2_grpc.add_WorkerAdminServiceServicer_to_server(self, server.server)
        server.add_service_names([pb2.DESCRIPTOR.services_by_name["WorkerAdminService"].full_name])

    async def ListHandles(
        self,
        request: pb2.ListHandlesRequest,  # noqa: ARG002
        context: object,  # noqa: ARG002
    ) -> pb2.ListHandlesResponse:
        """Return the requests that the worker knows."""
        steps = self._steps
        # No await in between: with a scheduler's coming and going, forgetting its requests is queued at once, so whose
        # they are is what it is now.
        response = pb2.ListHandlesResponse(worker_epoch=steps.worker_epoch, scheduler_epoch=steps.scheduler_epoch)
        handles = steps.executor.handles()
        response.handles.extend(await handles)
        return response

    async def ForgetHandles(
        self,
        request: pb2.ForgetHandlesRequest,
        context: object,  # noqa: ARG002
    ) -> pb2.ForgetHandlesResponse:
        """Forget requests, if the worker is still the one that was asked for them."""
        steps = self._steps
        if (request.worker_epoch, request.scheduler_epoch) != (steps.worker_epoch, steps.scheduler_epoch):
            text = "the worker, or its scheduler, is another than the one that was asked; list the handles again"
            raise EngineError(ErrorReason.STALE_EPOCH, text)
        known = steps.executor.handles()
        forgetting = steps.executor.submit(
            BatchPlan(_NO_PLAN_ID, finished_handles=tuple(Handle(handle) for handle in request.handles))
        )
        before = frozenset(await known)
        await forgetting
        forgotten = [handle for handle in request.handles if handle in before]
        return pb2.ForgetHandlesResponse(forgotten_handles=forgotten)
