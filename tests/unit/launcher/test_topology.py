"""The topology: what each process is told."""

from pathlib import Path

import pytest

from services.launcher.model_store import ResolvedModel
from services.launcher.settings import ServeSettings
from services.launcher.topology import (
    Machine,
    ServiceSpec,
    Tier,
    Topology,
    build_topology,
    join_host_port,
    private_service_names,
)

MODEL = ResolvedModel("tiny", Path("/models/tiny.gguf"))


def build(
    settings: ServeSettings | None = None, environ: dict[str, str] | None = None, config: Path | None = None
) -> Topology:
    settings = settings or ServeSettings()
    addresses = {name: f"unix:/run/{name}.sock" for name in private_service_names(settings)}
    return build_topology(settings, config, MODEL, addresses, Machine(4, environ or {}, python="py"))


def service(topology: Topology, name: str) -> ServiceSpec:
    return next(spec for spec in topology.services if spec.name == name)


def test_topology_lists_dependencies_first() -> None:
    topology = build(ServeSettings(workers=2))
    assert [spec.name for spec in topology.services] == ["kv_cache", "worker-0", "worker-1", "scheduler", "gateway"]
    assert [spec.tier for spec in topology.services] == sorted(spec.tier for spec in topology.services)
    assert {spec.service for spec in topology.services} == {tier.name.lower() for tier in Tier}


def test_services_are_started_by_module_name_away_from_the_working_directory() -> None:
    for spec in build().services:
        assert spec.command[:5] == ("py", "-P", "-m", f"services.{spec.service}", f"--name={spec.name}")


def test_scheduler_is_told_where_the_others_are() -> None:
    command = service(build(ServeSettings(workers=2)), "scheduler").command
    assert "--listen=unix:/run/scheduler.sock" in command
    assert "--kv-cache=unix:/run/kv_cache.sock" in command
    assert "--workers=worker-0=unix:/run/worker-0.sock,worker-1=unix:/run/worker-1.sock" in command


def test_gateway_listens_in_public_and_serves_the_model_under_its_name() -> None:
    topology = build(ServeSettings(host="0.0.0.0", http_port=9000, model_name="mine"))
    gateway = service(topology, "gateway")
    assert gateway.address == "127.0.0.1:9001"
    assert topology.url == "http://0.0.0.0:9000"
    for flag in (
        "--listen=0.0.0.0:9001",
        "--http-host=0.0.0.0",
        "--http-port=9000",
        "--scheduler=unix:/run/scheduler.sock",
        "--model=/models/tiny.gguf",
    ):
        assert flag in gateway.command
    assert "--model-name=mine" in service(topology, "worker-0").command


def test_unset_settings_are_left_to_the_service() -> None:
    unset = ("--dtype", "--kv-cache-gib", "--state-dir")
    assert not [flag for flag in service(build(), "worker-0").command if flag.startswith(unset)]
    command = service(build(ServeSettings(dtype="float32", kv_cache_gib=0.5)), "worker-0").command
    assert "--dtype=float32" in command
    assert "--kv-cache-gib=0.5" in command


def test_workers_are_told_how_to_guess_and_only_they() -> None:
    topology = build(ServeSettings(speculation="ngram", speculation_tokens=6, speculation_max_ngram=5))
    given = {"--speculation=ngram", "--speculation-tokens=6", "--speculation-max-ngram=5"}
    assert {flag for flag in service(topology, "worker-0").command if flag.startswith("--spec")} == given
    assert not [flag for flag in service(topology, "scheduler").command if flag.startswith("--spec")]


def test_scheduler_records_only_when_asked() -> None:
    assert not [flag for flag in service(build(), "scheduler").command if flag.startswith("--record")]
    command = service(build(ServeSettings(record="/plans", record_redact=True)), "scheduler").command
    assert "--record=/plans" in command
    assert "--record-redact=True" in command


def test_every_service_gets_the_shared_flags() -> None:
    for spec in build(ServeSettings(log_format="json", state_dir="/state"), config=Path("/mesh.yaml")).services:
        assert "--log-format=json" in spec.command
        assert "--state-dir=/state" in spec.command
        assert "--config=/mesh.yaml" in spec.command


def test_cores_are_split_among_the_workers_and_the_rest_computes_on_one() -> None:
    topology = build(ServeSettings(workers=2))
    assert service(topology, "worker-1").environment["OMP_NUM_THREADS"] == "2"
    assert service(topology, "worker-1").environment["TREADLE_WORKER_NUM_THREADS"] == "2"
    assert "TREADLE_WORKER_NUM_THREADS" not in service(build(), "worker-0").environment
    assert service(topology, "gateway").environment["OMP_NUM_THREADS"] == "1"


def test_variables_of_the_user_win() -> None:
    topology = build(environ={"OMP_NUM_THREADS": "7", "HOME": "/home/u"})
    environment = service(topology, "worker-0").environment
    assert (environment["OMP_NUM_THREADS"], environment["HOME"]) == ("7", "/home/u")


@pytest.mark.parametrize(
    ("host", "expected"), [("::1", "[::1]:80"), ("127.0.0.1", "127.0.0.1:80"), ("localhost", "localhost:80")]
)
def test_ipv6_address_is_put_in_brackets(host: str, expected: str) -> None:
    assert join_host_port(host, 80) == expected
