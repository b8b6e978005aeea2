"""`treadle serve`: everything between the command line and a supervised mesh."""

import asyncio
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from services.common.clock import SystemClock
from services.common.logs import set_up_logs
from services.launcher.guard import Guard
from services.launcher.model_store import ModelStore, default_store_root
from services.launcher.output import LineWriter, MergedOutput, announce_ready, write_all
from services.launcher.ports import find_free_ports, require_free_port
from services.launcher.progress import ProgressBar
from services.launcher.remote import watch_health
from services.launcher.replay import WorkerLaunch
from services.launcher.rotating_file import RotatingFile
from services.launcher.run_directory import RunDirectory, choose_run_directory
from services.launcher.service_runner import Surroundings
from services.launcher.settings import ServeCommand, ServeSettings
from services.launcher.state_directory import StateDirectory
from services.launcher.supervisor import Supervisor
from services.launcher.topology import Machine, Topology, build_topology, private_service_names

_STDOUT_FD: Final = 1
_STDERR_FD: Final = 2


def serve(command: ServeCommand, environ: Mapping[str, str]) -> int:
    """Run a mesh until it is told to stop; return the exit status.

    Standard output gets exactly one line, ``ready: http://HOST:PORT``; everything else goes to standard error.

    Raises:
        EngineError: INVALID_CONFIG, MODEL_NOT_FOUND or MODEL_LOAD_FAILED before anything was started.
    """
    settings = command.settings
    with contextlib.ExitStack() as stack:
        run_directory = stack.enter_context(choose_run_directory(settings.http_port, environ))
        state = None if settings.state_path is None else stack.enter_context(StateDirectory(settings.state_path))
        require_free_port(settings.host, settings.http_port, "http_port")
        require_free_port(settings.host, settings.public_grpc_port, "grpc_port")
        with ProgressBar() as progress:
            model = ModelStore(default_store_root(environ)).resolve(settings.model, progress)
        machine = Machine(num_cores=_count_cores(), environ=environ)
        addresses = _private_addresses(settings, run_directory)
        topology = build_topology(settings, command.config_path, model, addresses, machine)
        if settings.record_path is not None:
            WorkerLaunch.of(topology).write(settings.record_path)
        output = stack.enter_context(_merged_output(settings, None if state is None else state.log_path))
        return _supervise(topology, output, run_directory)


@contextlib.contextmanager
def _merged_output(settings: ServeSettings, log_path: Path | None) -> Iterator[MergedOutput]:
    """Send the logs of launcher and services to standard error, and to the log file if there is one."""
    with contextlib.ExitStack() as stack:

        def line_writer(write: Callable[[bytes], None]) -> LineWriter:
            writer = LineWriter(write)
            stack.callback(writer.close)
            return writer

        terminal = line_writer(functools.partial(write_all, _STDERR_FD))
        # Its descriptor is never closed: the thread may still write when the time for its last lines is up.
        log_file = None if log_path is None else line_writer(RotatingFile(log_path).write)
        set_up_logs("launcher", log_format=settings.log_format, level=settings.log_level)
        (handler,) = logging.getLogger().handlers
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(terminal)
        if log_file is not None:
            copy = logging.StreamHandler(log_file)
            copy.setFormatter(handler.formatter)
            logging.getLogger().addHandler(copy)
        has_colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        yield MergedOutput(terminal, settings.log_format, has_colour=has_colour, log_file=log_file)


def _supervise(topology: Topology, output: MergedOutput, run_directory: RunDirectory) -> int:
    # The write end stays with this process alone: when it closes, by whatever death, every service knows.
    lifeline_fd, launcher_end_fd = os.pipe()
    try:
        with Guard() as guard:
            surroundings = Surroundings(lifeline_fd, output.write_line, watch_health, guard.watch, SystemClock())

            announce = functools.partial(announce_ready, _STDOUT_FD, topology.url)

            async def run() -> int:
                return await Supervisor(topology, surroundings, os.getpid(), run_directory.write, announce).run()

            return asyncio.run(run())
    finally:
        os.close(launcher_end_fd)
        os.close(lifeline_fd)


def _private_addresses(settings: ServeSettings, run_directory: RunDirectory) -> Mapping[str, str]:
    names = private_service_names(settings)
    if settings.tcp:
        return {name: f"127.0.0.1:{port}" for name, port in find_free_ports(names).items()}
    return {name: run_directory.socket_address(name) for name in names}


def _count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
