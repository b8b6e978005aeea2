"""Run a worker: ``python -P -m services.worker --name worker-0 --listen ADDRESS --model PATH``."""

from services.common.bootstrap import exit_process, run_service
from services.worker.config import WorkerConfig
from services.worker.service import WorkerService

if __name__ == "__main__":
    exit_process(run_service("worker", WorkerConfig, WorkerService))
