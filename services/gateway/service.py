"""Wiring and lifecycle of a gateway: HTTP and gRPC over one generation path; ready while the scheduler is."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from services.common.clock import SystemClock
from services.common.errors import EngineError, ErrorReason
from services.common.rpc.server import RpcServer
from services.common.version import treadle_version
from services.gateway.chat_template import ChatTemplate
from services.gateway.config import GatewayConfig
from services.gateway.generation import Backing
from services.gateway.http_api import build_http_api
from services.gateway.http_exchange import HttpSettings
from services.gateway.http_protocol import HttpProtocol
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai_schema import RequestValidator
from services.gateway.remote import RemoteScheduler
from services.gateway.servicer import GenerationServicer
from services.gateway.text_generator import GenerationSettings, TextGenerator
from services.gateway.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

_READINESS_INTERVAL_S = 0.05


class GatewayService:
    """Implements ``services.common.bootstrap.Service``."""

    def __init__(self, config: GatewayConfig, server: RpcServer, epoch: int) -> None:
        self._server = server
        clock = SystemClock()
        tokenizer = load_tokenizer(Path(config.model))
        template = ChatTemplate(tokenizer.chat_template, tokenizer.special_token_texts, clock=clock)
        name = config.name or "gateway"
        self._scheduler = RemoteScheduler(config.scheduler, name, epoch, config.resume_timeout_s, clock)
        backing = Backing(self._scheduler, tokenizer, GatewayMetrics(), clock)
        generation_settings = GenerationSettings(config.tenant, config.default_timeout_s)
        generator = TextGenerator(backing, template, generation_settings)
        servicer = GenerationServicer(
            self._scheduler, tokenizer, RequestValidator(self._scheduler, tokenizer), generator
        )
        servicer.register_on(server)
        settings = HttpSettings(
            max_body_bytes=config.max_body_bytes,
            keep_alive_s=config.keep_alive_s,
            write_timeout_s=config.write_timeout_s,
            max_exchanges=config.max_exchanges,
        )
        app = build_http_api(self._scheduler, tokenizer, generator, settings, treadle_version())
        self._http = HttpServer(
            uvicorn.Config(
                app,
                host=config.http_host,
                port=config.http_port,
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            EngineError: INVALID_CONFIG: the HTTP port cannot be bound.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._scheduler.run(), name="gateway.scheduler")
            tasks.create_task(self._publish_readiness(), name="gateway.readiness")
            tasks.create_task(self._http.run(), name="gateway.http")

    async def drain(self) -> None:
        """Refuse new requests and finish the running ones."""
        await self._scheduler.drain()
        await self._http.stop()

    async def _publish_readiness(self) -> None:
        is_ready = False
        while True:
            if self._scheduler.is_ready() is not is_ready:
                is_ready = not is_ready
                await self._server.set_ready(is_ready=is_ready)
                reasons = ", ".join(self._scheduler.unready_reasons())
                logger.info(
                    "ready" if is_ready else "not ready", extra={"fields": {"reasons": reasons} if reasons else {}}
                )
            await asyncio.sleep(_READINESS_INTERVAL_S)


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers: the bootstrap owns the life of the process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process' signal handlers alone."""
        yield

    async def run(self) -> None:  # type: ignore[override]  # the base class's is the blocking form, unused here
        """Serve until :meth:`stop`, or until cancelled.

        Raises:
            EngineError: INVALID_CONFIG when the port cannot be bound.
        """
        try:
            await self.serve()
        except SystemExit as error:  # uvicorn's way of saying that it could not bind
            text = f"cannot listen on {self.config.host}:{self.config.port}; is the port taken?"
            raise EngineError(ErrorReason.INVALID_CONFIG, text, field="http_port") from error
        finally:
            self._stopped.set()

    async def stop(self) -> None:
        """Close idle connections, give the others a second, and stop."""
        self.should_exit = True
        await self._stopped.wait()
