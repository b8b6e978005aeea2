"""Which processes make up a local mesh: their commands, addresses and environment. Pure.

This is the only place that knows what one service needs to be told about another, and the only one that sets variables
for gRPC, OpenMP and the like.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from services.launcher.model_store import ResolvedModel
from services.launcher.settings import ServeSettings

_WILDCARD_HOSTS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Tier(IntEnum):
    """Position in the chain of dependencies; each tier needs the lower ones. Stopping goes from the highest down."""

    KV_CACHE = 0
    WORKER = 1
    SCHEDULER = 2
    GATEWAY = 3


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process to run.

    Attributes:
        name: Unique in the mesh, such as ``worker-0``.
        service: Name that its health answers for, such as ``worker``.
        tier: Position in the chain of dependencies.
        command: Program and arguments, without the lifeline.
        address: gRPC target at which it is probed.
        environment: The whole environment of the process.
    """

    name: str
    service: str
    tier: Tier
    command: tuple[str, ...]
    address: str
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Topology:
    """A whole mesh.

    Attributes:
        services: Dependencies first.
        url: Where clients find the HTTP server.
        model: Name of the served model.
        drain_timeout_s: Longest time, in seconds, for running requests to finish at a stop.
    """

    services: tuple[ServiceSpec, ...]
    url: str
    model: str
    drain_timeout_s: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What of the surroundings shapes the topology.

    Attributes:
        num_cores: Cores that this process may use.
        environ: Variables that the services inherit.
        python: Interpreter of the services.
    """

    num_cores: int
    environ: Mapping[str, str]
    python: str = sys.executable


def build_topology(
    settings: ServeSettings,
    config_path: Path | None,
    model: ResolvedModel,
    addresses: Mapping[str, str],
    machine: Machine,
) -> Topology:
    """Lay out a mesh.

    Args:
        settings: What the user asked for.
        config_path: File that the services read their own sections from.
        model: Resolved model.
        addresses: Private gRPC address by name, for each of :func:`private_service_names`.
        machine: Cores, environment, interpreter.
    """
    worker_names = _worker_names(settings)
    common = _flags(
        log_format=settings.log_format,
        log_level=settings.log_level,
        drain_timeout_s=settings.drain_timeout_s,
        config=config_path,
        state_dir=settings.state_path,
    )

    def spec(
        name: str, tier: Tier, flags: Sequence[str], *, address: str | None = None, num_threads: int = 1
    ) -> ServiceSpec:
        """Describe a process; it listens where it is probed unless ``address`` says that its flags say otherwise."""
        listen = [] if address is not None else [f"--listen={addresses[name]}"]
        service = tier.name.lower()
        command = (machine.python, "-P", "-m", f"services.{service}", f"--name={name}", *listen, *flags, *common)
        environment = _environment(machine.environ, num_threads, shares_cores=settings.workers > 1)
        return ServiceSpec(name, service, tier, command, address or addresses[name], environment)

    threads_per_worker = max(1, machine.num_cores // settings.workers)
    worker_flags = _worker_flags(settings, model)
    probe_host = _WILDCARD_HOSTS.get(settings.host, settings.host)
    return Topology(
        services=(
            spec("kv_cache", Tier.KV_CACHE, []),
            *(spec(name, Tier.WORKER, worker_flags, num_threads=threads_per_worker) for name in worker_names),
            spec("scheduler", Tier.SCHEDULER, _scheduler_flags(settings, worker_names, addresses)),
            spec(
                "gateway",
                Tier.GATEWAY,
                _gateway_flags(settings, model, addresses["scheduler"]),
                address=join_host_port(probe_host, settings.public_grpc_port),
            ),
        ),
        url=f"http://{join_host_port(settings.host, settings.http_port)}",
        model=settings.model_name or model.name,
        drain_timeout_s=settings.drain_timeout_s,
    )


def private_service_names(settings: ServeSettings) -> list[str]:
    """Return the names of the processes that only the mesh itself talks to. Pure."""
    return ["kv_cache", *_worker_names(settings), "scheduler"]


def join_host_port(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with brackets round an IPv6 address. Pure."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _worker_names(settings: ServeSettings) -> list[str]:
    return [f"worker-{index}" for index in range(settings.workers)]


def _worker_flags(settings: ServeSettings, model: ResolvedModel) -> list[str]:
    return _flags(
        model=model.path,
        model_name=settings.model_name or model.name,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        backend=settings.backend,
        dtype=settings.dtype,
        quantization=settings.quantization,
        activation_bits=settings.activation_bits,
        activations=settings.activations,
        kv_dtype=settings.kv_dtype,
        device=settings.device,
        kv_cache_gib=settings.kv_cache_gib,
        swap_space_gib=settings.swap_space_gib,
        swap_compression=settings.swap_compression,
        max_model_len=settings.max_model_len,
        speculation=settings.speculation,
        speculation_tokens=settings.speculation_tokens,
        speculation_min_ngram=settings.speculation_min_ngram,
        speculation_max_ngram=settings.speculation_max_ngram,
    )


def _scheduler_flags(settings: ServeSettings, worker_names: Sequence[str], addresses: Mapping[str, str]) -> list[str]:
    return _flags(
        kv_cache=addresses["kv_cache"],
        workers=",".join(f"{name}={addresses[name]}" for name in worker_names),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_requests=settings.max_num_requests,
        run_ahead_depth=settings.run_ahead_depth,
        record=settings.record_path,
        record_redact=settings.record_redact,
    )


def _gateway_flags(settings: ServeSettings, model: ResolvedModel, scheduler: str) -> list[str]:
    return _flags(
        listen=join_host_port(settings.host, settings.public_grpc_port),
        http_host=settings.host,
        http_port=settings.http_port,
        scheduler=scheduler,
        model=model.path,
    )


def _flags(**values: object) -> list[str]:
    """Write values as flags; None is left to the service."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


def _environment(inherited: Mapping[str, str], num_threads: int, *, shares_cores: bool) -> dict[str, str]:
    """Return the environment of a service; what the user set wins over what we would choose."""
    chosen = {
        "PYTHONUNBUFFERED": "1",  # a crash must not swallow the lines that explain it
        "PYTHONFAULTHANDLER": "1",
        "GRPC_ENABLE_FORK_SUPPORT": "0",  # no service forks with gRPC up; the support costs locks
        "GRPC_VERBOSITY": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",  # one prompt at a time; its threads would take the device's cores
        # Of a compute library each process gets only its own cores, else the workers' threads push each other aside.
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OPENBLAS_NUM_THREADS": str(num_threads),
    }
    if shares_cores:
        chosen["TREADLE_WORKER_NUM_THREADS"] = str(num_threads)  # a worker alone takes every core by itself
    return {**chosen, **inherited}
