"""The wire adapters of a worker: the scheduler's plans, and what operators ask."""

from services.worker.servicer.admin import WorkerAdminServicer
from services.worker.servicer.plan_wire import Capabilities
from services.worker.servicer.steps import Executor, WorkerServicer

__all__ = ["Capabilities", "Executor", "WorkerAdminServicer", "WorkerServicer"]
