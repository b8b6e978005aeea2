"""`treadle replay`: starts a worker like the recorded one, has its plans run again, and stops it.

What is in a log only the scheduler's package knows, which runs here as a program. What the log does not tell, `treadle
serve` leaves beside it (:class:`WorkerLaunch`).
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from services.common.clock import SystemClock
from services.common.errors import EngineError, ErrorReason
from services.launcher.guard import Guard
from services.launcher.model_store import ModelStore, default_store_root
from services.launcher.progress import ProgressBar
from services.launcher.remote import watch_health
from services.launcher.service_runner import ServiceRunner, Surroundings
from services.launcher.topology import ServiceSpec, Tier, Topology

EXIT_REFUSED: Final = 2
_LAUNCH_FILE: Final = "worker.json"
_COMMAND: Final = ("-P", "-m", "services.worker")
_SHAPES_RESULTS: Final = re.compile(r"TREADLE_WORKER_\w+|\w+_NUM_THREADS")
_STOP_GRACE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """How a mesh starts its workers, left beside its plan log so that one can be started alike.

    Attributes:
        flags: Of the first worker, without where it listens.
        environment: What of its environment shapes what it computes; how a sum is split among threads can change its
            last bit.
    """

    flags: tuple[str, ...]
    environment: Mapping[str, str]

    @classmethod
    def of(cls, topology: Topology) -> "WorkerLaunch":
        """Return how the workers of a mesh are started. Pure."""
        spec = next(spec for spec in topology.services if spec.tier is Tier.WORKER)
        flags = spec.command[len(_COMMAND) + 1 :]  # without the interpreter
        environment = {name: text for name, text in spec.environment.items() if _SHAPES_RESULTS.fullmatch(name)}
        return cls(tuple(flag for flag in flags if not flag.startswith("--listen=")), environment)

    @classmethod
    def read(cls, directory: Path) -> "WorkerLaunch":
        """Return what was left beside a log.

        Raises:
            EngineError: REPLAY_REFUSED when it is not there.
        """
        try:
            document = json.loads((directory / _LAUNCH_FILE).read_text(encoding="utf-8"))
            return cls(tuple(document["flags"]), document["environment"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            text = f"{directory / _LAUNCH_FILE} does not tell how the recorded worker was started: {error}"
            raise EngineError(ErrorReason.REPLAY_REFUSED, text) from error

    def write(self, directory: Path) -> None:
        """Leave it in a directory, which is created for this user alone if need be.

        Raises:
            OSError: the directory cannot be written.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = directory / f"{_LAUNCH_FILE}.tmp"
        scratch.touch(mode=0o600)
        scratch.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        scratch.replace(directory / _LAUNCH_FILE)

    def spec(self, address: str, environ: Mapping[str, str], model: Path | None) -> ServiceSpec:
        """Describe a worker that is started alike, listens at ``address``, and may take the model from elsewhere."""
        moved = () if model is None else (f"--model={model}",)
        # The last of equal flags counts.
        command = (sys.executable, *_COMMAND, *self.flags, f"--listen={address}", "--log-level=warning", *moved)
        return ServiceSpec("worker", "worker", Tier.WORKER, command, address, {**environ, **self.environment})


def replay_plans(directory: Path, model: str | None, environ: Mapping[str, str]) -> int:
    """Run a log's plans again on a fresh worker.

    Args:
        directory: Of the log.
        model: As for `treadle serve`; None: where it was.
        environ: The environment.

    Returns:
        0: every token is the same; 1: some differ; 2: refused.

    Raises:
        EngineError: REPLAY_REFUSED, or MODEL_NOT_FOUND for a given ``model``.
    """
    checked = subprocess.run(_program(directory, "check"), check=False)
    if checked.returncode:
        return checked.returncode
    launch = WorkerLaunch.read(directory)
    with tempfile.TemporaryDirectory(prefix="treadle-") as sockets:
        path = None if model is None else _find_model(model, environ)
        spec = launch.spec(f"unix:{sockets}/worker.sock", environ, path)
        return _run_on_worker(spec, _program(directory, "run", f"--worker={spec.address}"))


def replay_arrivals(directory: Path, policies: Sequence[str]) -> int:
    """Plan a log's arrivals again under other policies, in simulation, and print the latencies; return the status."""
    flags = [f"--policy={policy}" for policy in policies]
    return subprocess.run(_program(directory, "simulate", *flags), check=False).returncode


def _program(directory: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "services.scheduler.replay", str(directory), *arguments]


def _find_model(model: str, environ: Mapping[str, str]) -> Path:
    with ProgressBar() as progress:
        return ModelStore(default_store_root(environ)).resolve(model, progress).path


def _run_on_worker(spec: ServiceSpec, program: Sequence[str]) -> int:
    lifeline_fd, launcher_end_fd = os.pipe()
    try:
        with Guard() as guard:
            surroundings = Surroundings(lifeline_fd, _print_line, watch_health, guard.watch, SystemClock())
            return asyncio.run(_supervise(spec, surroundings, program))
    finally:
        os.close(launcher_end_fd)
        os.close(lifeline_fd)


async def _supervise(spec: ServiceSpec, surroundings: Surroundings, program: Sequence[str]) -> int:
    """Run ``program`` while the worker is up; return its exit status, or 2 when the worker does not come up."""
    runner = ServiceRunner(spec, surroundings, lambda _name, _exit_code: False, lambda: None)
    exit_code = EXIT_REFUSED
    async with asyncio.TaskGroup() as tasks:
        living = tasks.create_task(runner.run(), name=spec.name)
        getting_ready = tasks.create_task(runner.became_ready.wait(), name="ready")
        await asyncio.wait({living, getting_ready}, return_when=asyncio.FIRST_COMPLETED)
        if runner.became_ready.is_set():
            exit_code = await _run_program(program)
        getting_ready.cancel()
        await runner.stop(_STOP_GRACE_S)
    return exit_code


async def _run_program(program: Sequence[str]) -> int:
    """Run a program to its end. Cancellation: it is killed and reaped first."""
    process = await asyncio.create_subprocess_exec(*program)
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())


def _print_line(_name: str, line: str) -> None:
    print(line, file=sys.stderr)
