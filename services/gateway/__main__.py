"""Run a gateway: ``python -P -m services.gateway --listen HOST:PORT --scheduler ADDRESS --model PATH``."""

from services.common.bootstrap import exit_process, run_service
from services.gateway.config import GatewayConfig
from services.gateway.service import GatewayService

if __name__ == "__main__":
    exit_process(run_service("gateway", GatewayConfig, GatewayService))
