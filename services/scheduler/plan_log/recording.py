"""What the scheduler's adapters tell a recorder; this one records nothing, :mod:`recorder` has the one that does."""

from services.common.errors import EngineError
from services.scheduler.core.events import RequestEvent
from treadle.scheduler.v1 import scheduler_service_pb2
from treadle.worker.v1 import batch_plan_pb2, worker_service_pb2


class Recorder:
    """Hears what happens and forgets it.

    All methods are called on the event loop's thread and return at once. A message that is handed over must not be
    changed afterwards.
    """

    def worker_started(self, capabilities: worker_service_pb2.Capabilities) -> int:  # noqa: ARG002
        """Note a new stream to a worker; return the number that names it later."""
        return 0

    def worker_ended(self, stream: int) -> None:
        """Note the end of a stream."""

    def plan_sent(self, stream: int, plan: batch_plan_pb2.BatchPlan) -> None:
        """Note a plan."""

    def result_received(self, stream: int, result: batch_plan_pb2.StepResult) -> None:
        """Note a result."""

    def plan_failed(self, stream: int, plan_id: int, message: str) -> None:
        """Note that a worker could not execute a plan."""

    def request_arrived(self, gateway: str, submission: scheduler_service_pb2.Submission) -> None:
        """Note a submission, before anything is decided about it."""

    def request_cancelled(self, request_id: str) -> None:
        """Note a gateway's wish."""

    def request_refused(self, request_id: str, error: EngineError) -> None:
        """Note that a submission was not taken in."""

    def request_ended(self, event: RequestEvent, finish: scheduler_service_pb2.Finish | None) -> None:
        """Note the last event of a request; ``finish`` as its gateway is told it, None for an error."""

    def close(self) -> None:
        """Write what is left, within a few seconds. Later calls record nothing."""
