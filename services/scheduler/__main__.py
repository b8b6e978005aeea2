"""Run the scheduler: ``python -P -m services.scheduler --listen A --kv-cache A --workers worker-0=A``."""

from services.common.bootstrap import exit_process, run_service
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerService

if __name__ == "__main__":
    exit_process(run_service("scheduler", SchedulerConfig, SchedulerService))
