"""`treadle serve`: everything between the command line and a supervised mesh."""

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from typing import Final

from services.common.clock import SystemClock
from services.common.logs import set_up_logs
from services.launcher.guard import Guard
from services.launcher.model_store import ModelStore, default_store_root
from services.launcher.output import LineWriter, MergedOutput
from services.launcher.ports import find_free_ports, require_free_port
from services.launcher.progress import ProgressBar
from services.launcher.remote import watch_health
from services.launcher.run_directory import RunDirectory, choose_run_directory
from services.launcher.service_runner import Surroundings
from services.launcher.settings import ServeCommand, ServeSettings
from services.launcher.supervisor import Supervisor
from services.launcher.topology import Machine, Topology, build_topology, private_service_names

_STDERR_FD: Final = 2


def serve(command: ServeCommand, environ: Mapping[str, str]) -> int:
    """Run a mesh until it is told to stop; return the exit status.

    Standard output gets exactly one line, ``ready: http://HOST:PORT``; everything else goes to standard error.

    Raises:
        EngineError: INVALID_CONFIG, MODEL_NOT_FOUND or MODEL_LOAD_FAILED before anything was started.
    """
    settings = command.settings
    with choose_run_directory(settings.http_port, environ) as run_directory:
        require_free_port(settings.host, settings.http_port, "http_port")
        require_free_port(settings.host, settings.public_grpc_port, "grpc_port")
        with ProgressBar() as progress:
            model = ModelStore(default_store_root(environ)).resolve(settings.model, progress)
        machine = Machine(num_cores=_count_cores(), environ=environ)
        addresses = _private_addresses(settings, run_directory)
        topology = build_topology(settings, command.config_path, model, addresses, machine)
        return _supervise(topology, settings, run_directory)


def _supervise(topology: Topology, settings: ServeSettings, run_directory: RunDirectory) -> int:
    writer = LineWriter(_STDERR_FD)
    set_up_logs("launcher", log_format=settings.log_format, level=settings.log_level)
    for handler in logging.getLogger().handlers:
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(writer)
    has_colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    output = MergedOutput(writer, settings.log_format, has_colour=has_colour)
    # The write end stays with this process alone: when it closes, by whatever death, every service knows.
    lifeline_fd, launcher_end_fd = os.pipe()
    try:
        with Guard() as guard:
            surroundings = Surroundings(lifeline_fd, output.write_line, watch_health, guard.watch, SystemClock())

            async def run() -> int:
                return await Supervisor(
                    topology, surroundings, os.getpid(), run_directory.write, lambda: _announce(topology.url)
                ).run()

            return asyncio.run(run())
    finally:
        os.close(launcher_end_fd)
        os.close(lifeline_fd)
        writer.close()


def _announce(url: str) -> None:
    print(f"ready: {url}", flush=True)


def _private_addresses(settings: ServeSettings, run_directory: RunDirectory) -> Mapping[str, str]:
    names = private_service_names(settings)
    if settings.tcp:
        return {name: f"127.0.0.1:{port}" for name, port in find_free_ports(names).items()}
    return {name: run_directory.socket_address(name) for name in names}


def _count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
