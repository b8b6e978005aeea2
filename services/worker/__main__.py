"""Run a worker: ``python -P -m services.worker --name worker-0 --listen ADDRESS --model PATH``."""

import sys

from services.common.bootstrap import run_service
from services.worker.config import WorkerConfig
from services.worker.service import WorkerService

if __name__ == "__main__":
    sys.exit(run_service("worker", WorkerConfig, WorkerService))
