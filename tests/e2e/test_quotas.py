"""Quotas of a mesh of processes: a file that limits one tenant while another streams on, and that is changed live."""

import asyncio
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.common.clock import SystemClock
from services.common.epoch import new_epoch
from services.gateway.ports import SchedulerRequest
from services.gateway.remote import RemoteScheduler
from tests.contract.test_scheduler_port import read_all, request, tokens_of
from tests.inner_mesh import running, until
from tests.mesh import Mesh, running_mesh
from tests.model_files import random_weights, tiny_config, write_hf_directory
from treadle.kv_cache.v1 import kv_cache_admin_service_pb2 as admin_pb2
from treadle.kv_cache.v1 import kv_cache_admin_service_pb2_grpc as admin_pb2_grpc
from treadle.kv_cache.v1 import kv_cache_service_pb2 as pb2
from treadle.kv_cache.v1 import kv_cache_service_pb2_grpc as pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK_SIZE = 32
GATEWAY_TENANT = "default"


@pytest.fixture(scope="module")
def quotas_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quotas") / "quotas.yaml"
    path.write_text("quotas: []\n")
    return path


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, quotas_file: Path) -> Iterator[Mesh]:
    config = tiny_config(max_model_len=4096)
    folder = tmp_path_factory.mktemp("tiny")
    model = write_hf_directory(folder, config, random_weights(config))
    settings = quotas_file.with_name("treadle.yaml")
    settings.write_text(f"kv_cache:\n  quotas_file: {quotas_file}\n")
    flags = ["--kv-cache-gib", "0.01", "--dtype", "float32", "--config", str(settings)]
    with running_mesh(model, *flags) as mesh:
        yield mesh


def address_of(mesh: Mesh, name: str) -> str:
    return next(str(service["address"]) for service in mesh.status() if service["name"] == name)


def set_limit(mesh: Mesh, quotas_file: Path, max_tokens: int) -> None:
    """Write the file as an operator does, and have it read; a tenant may hold so many tokens."""
    with grpc.insecure_channel(address_of(mesh, "kv_cache")) as channel:
        usage = pb2_grpc.KVCacheServiceStub(channel).GetUsage(pb2.GetUsageRequest(), timeout=5)
        num_blocks = -(-max_tokens // BLOCK_SIZE)
        ratio = round((num_blocks + 0.5) / (usage.pools[0].num_blocks - 1), 6)
        quotas_file.write_text(f"quotas:\n  - {{tenant: {GATEWAY_TENANT}, limit: {ratio}}}\n")
        mesh.kill("kv_cache", signal.SIGHUP)
        admin = admin_pb2_grpc.KVCacheAdminServiceStub(channel)

        def is_in_force() -> bool:
            rules = admin.GetQuotas(admin_pb2.GetQuotasRequest(), timeout=5).rules
            return [rule.limit_ratio for rule in rules] == [ratio]

        mesh.wait_until(is_in_force, 10, "the quotas being read")


def body(first_id: int, num_prompt_tokens: int, max_tokens: int, request_id: str) -> dict[str, Any]:
    prompt = [first_id, *(5 + index % 200 for index in range(num_prompt_tokens - 1))]
    sampling = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, "max_tokens": max_tokens, "request_id": request_id, **sampling}


def ids_of(answer: tuple[int, dict[str, Any]]) -> list[int]:
    status, document = answer
    assert status == 200, document
    return list(document["choices"][0]["token_ids"])


def test_request_beyond_its_tenants_limit_is_refused_until_the_file_allows_it(mesh: Mesh, quotas_file: Path) -> None:
    set_limit(mesh, quotas_file, 1000)
    status, answer = mesh.post("/v1/completions", body(7, 900, 200, "too-large"))
    assert status == 400
    assert answer["error"]["code"] == "exceeds_kv_capacity"
    assert len(ids_of(mesh.post("/v1/completions", body(7, 900, 100, "fits")))) == 100
    chat = {"messages": [{"role": "user", "content": "x" * 200}], "temperature": 0, "ignore_eos": True}
    status, answer = mesh.post("/v1/chat/completions", chat)  # names no limit, and gets what there is
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 32 * BLOCK_SIZE + 1
    set_limit(mesh, quotas_file, 1200)
    assert len(ids_of(mesh.post("/v1/completions", body(7, 900, 200, "fits-now")))) == 200


async def test_tenant_at_its_limit_waits_for_itself_while_another_streams_on(mesh: Mesh, quotas_file: Path) -> None:
    set_limit(mesh, quotas_file, 20_000)
    wanted = {name: body(first_id, 2000, 600, name) for first_id, name in ((11, "first"), (12, "second"))}
    expected = {
        name: ids_of(mesh.post("/v1/completions", wanted[name] | {"request_id": name + "0"})) for name in wanted
    }
    set_limit(mesh, quotas_file, 2700)
    clock = SystemClock()
    other = RemoteScheduler(address_of(mesh, "scheduler"), "another-gateway", new_epoch(clock), 5.0, clock)
    async with running(other.run()), httpx.AsyncClient(base_url=mesh.url, timeout=120) as client:
        await until(other.is_ready)
        async with asyncio.TaskGroup() as tasks:
            answers = {
                name: tasks.create_task(client.post("/v1/completions", json=wanted[name]))
                for name in ("first", "second")
            }
            streams = [tasks.create_task(read_all(other, of_other_tenant(f"other{index}"))) for index in range(4)]
    for name, task in answers.items():
        response = task.result()
        assert ids_of((response.status_code, response.json())) == expected[name]
    assert [len(tokens_of(stream.result())) for stream in streams] == [300] * 4
    causes = {name: blocked_causes(mesh, name) for name in wanted}
    # Whichever came second waited for the other, and nobody of the other tenant for either.
    assert sorted(causes.values()) == [[], ["tenant_limit"]]
    mesh.wait_until_nothing_is_held(timeout_s=10)


def of_other_tenant(request_id: str) -> SchedulerRequest:
    made = replace(
        request(request_id, max_tokens=300), tenant="other", cache_scope="other", model="", weight_version=""
    )
    return replace(made, prompt_token_ids=(20, 21, 22))


def blocked_causes(mesh: Mesh, request_id: str) -> list[str]:
    status, answer = mesh.get(f"/v1/requests/{request_id}/timeline")
    assert status == 200
    events = json.loads(answer)["choices"][0]["events"]
    return [event["cause"] for event in events if event["type"] == "blocked"]
