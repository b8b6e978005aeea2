"""A service's life, the same for all four: start, run, drain, stop.

Owns the event loop, the signal handlers and the order of things. A service gives a :class:`Service`; ``__main__`` is
then three lines. The order of stopping, in words:

1. health turns NOT_SERVING, so that nobody sends new work;
2. wait ``notice_s`` until balancers have noticed;
3. refuse new work with DRAINING, finish what runs, for ``drain_timeout_s`` at most;
4. stop the server; what is left gets a short grace, then an explicit error;
5. cancel the service's own tasks, which closes its channels.
"""

import asyncio
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol, TypeVar

import uvloop

from services.common.clock import SystemClock
from services.common.config import ServiceConfig, load_config
from services.common.epoch import new_epoch
from services.common.errors import EngineError
from services.common.garbage import settle_garbage_collector
from services.common.lifeline import start_lifeline_watch
from services.common.logs import set_up_logs
from services.common.rpc.server import RpcServer
from services.common.verify import set_verification

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 1.0


class Service(Protocol):
    """What :func:`run_service` drives."""

    async def run(self) -> None:
        """Do the work until cancelled; the server is up. Turns ready through ``RpcServer.set_ready``."""
        ...

    async def drain(self) -> None:
        """Refuse new work and return when the running work is done; may be cancelled when time is up."""
        ...


Config = TypeVar("Config", bound=ServiceConfig)
Builder = Callable[[Config, RpcServer, int], Service]


def run_service(service_name: str, config_type: type[Config], build: Builder[Config]) -> int:
    """Run one service in this process and return its exit status.

    Args:
        service_name: ``gateway``, ``scheduler``, ``kv_cache`` or ``worker``.
        config_type: Filled from ``sys.argv``, the environment and the file.
        build: Makes the service from its config, the server to register on, and the epoch.
    """
    try:
        config = load_config(config_type, service_name, sys.argv[1:], os.environ)
    except EngineError as error:
        print(f"{service_name}: {error}", file=sys.stderr)  # noqa: T201 - logs are not set up yet
        return 2
    name = config.name or service_name
    set_up_logs(name, log_format=config.log_format, level=config.log_level)
    set_verification(enabled=config.verify_invariants)
    try:
        uvloop.run(_live(service_name, name, config, build))
    except Exception as failure:  # the last place where it can be told
        for cause in _leaves(failure):
            logger.critical("service failed: %s", cause, exc_info=cause)
        return 1
    return 0


def exit_process(status: int) -> NoReturn:
    """End this process at once, after a service has stopped and its logs are out.

    Native threads (compute pools, gRPC) may still run when an interpreter is torn down, and then abort a process that
    has done everything right; nothing is left that a tear-down would do.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


async def _live(service_name: str, name: str, config: Config, build: Builder[Config]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    if config.lifeline_fd >= 0:
        # The launcher is gone: nobody is left to wait for a long drain.
        start_lifeline_watch(config.lifeline_fd, lambda: _wake(loop, stop))
    epoch = new_epoch(SystemClock())
    server = RpcServer(name, service_name, epoch)
    service = build(config, server, epoch)
    logger.info("starting", extra={"fields": {"epoch": epoch, "pid": os.getpid(), **dataclasses.asdict(config)}})
    await server.start(config.listen)
    async with asyncio.TaskGroup() as tasks:
        work = tasks.create_task(service.run(), name=f"{name}.run")
        settling = tasks.create_task(_settle(server), name=f"{name}.settle")
        await _wait_for_stop(stop, work)
        settling.cancel()
        await _stop(config, server, service)
        work.cancel()
    logger.info("stopped")


async def _settle(server: RpcServer) -> None:
    await server.wait_until_ready()
    settle_garbage_collector()


def _wake(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    loop.call_soon_threadsafe(stop.set)


async def _wait_for_stop(stop: asyncio.Event, work: asyncio.Task[None]) -> None:
    """Return when a stop is asked for, or when the work has ended by itself (which then raises in the group)."""
    work.add_done_callback(lambda _: stop.set())
    await stop.wait()


async def _stop(config: ServiceConfig, server: RpcServer, service: Service) -> None:
    logger.info("draining")
    await server.begin_drain()
    await asyncio.sleep(config.notice_s)
    try:
        async with asyncio.timeout(config.drain_timeout_s):
            await service.drain()
    except TimeoutError:
        logger.warning("drain timed out", extra={"fields": {"drain_timeout_s": config.drain_timeout_s}})
    await server.stop(_STOP_GRACE_S)
