"""Quotas over the wire: an owner gets its reservation back from those in burst, whose answers stay the same."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from services.gateway.ports import SchedulerRequest
from services.gateway.timeline import Preempted
from services.kv_cache.core import QuotaRule, Quotas
from tests.contract.test_scheduler_port import PROMPT, read_all, request, tokens_of
from tests.fakes.fake_executor import continuation
from tests.inner_mesh import inner_mesh, until

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

NUM_BURST_TOKENS = 150
NUM_OWNER_TOKENS = 40


def of(tenant: str, request_id: str, max_tokens: int) -> SchedulerRequest:
    return replace(request(request_id, max_tokens), tenant=tenant, cache_scope=tenant)


async def test_owner_reclaims_its_reservation_and_every_answer_is_the_undisturbed_one(tmp_path: Path) -> None:
    async with inner_mesh(tmp_path, num_blocks=13, max_model_len=160, flags={"max_num_requests": 8}) as mesh:
        assert mesh.scheduler is not None
        assert mesh.manager is not None
        manager, executor = mesh.manager, mesh.executors["worker-0"]
        manager.set_quotas(Quotas((QuotaRule("*", "owner", reserved_ratio=0.5),)))
        async with asyncio.TaskGroup() as tasks:
            burst = [
                tasks.create_task(read_all(mesh.scheduler, of("burst", f"b{index}", NUM_BURST_TOKENS)))
                for index in range(3)
            ]
            await until(lambda: manager.usage("worker-0").num_held >= 11)
            executor.is_open.clear()  # so that nobody ends before the owner asks
            owner = [
                tasks.create_task(read_all(mesh.scheduler, of("owner", f"o{index}", NUM_OWNER_TOKENS)))
                for index in range(2)
            ]
            await until(lambda: len(manager.pool("worker-0").ledger.accounts) == 2)
            executor.is_open.set()
        assert [tokens_of(task.result()) for task in burst] == [continuation(list(PROMPT), NUM_BURST_TOKENS)] * 3
        assert [tokens_of(task.result()) for task in owner] == [continuation(list(PROMPT), NUM_OWNER_TOKENS)] * 2
        await until(lambda: manager.usage("worker-0").num_leases == 0)
        causes = [await causes_of_preemptions(mesh.scheduler, "burst", f"b{index}") for index in range(3)]
        assert any("burst_reclaimed" in each for each in causes)
        assert [await causes_of_preemptions(mesh.scheduler, "owner", f"o{index}") for index in range(2)] == [[], []]


async def causes_of_preemptions(scheduler, tenant: str, request_id: str) -> list[str]:
    (timeline,) = await scheduler.explain(request_id, tenant)
    return [event.cause for event in timeline.events if isinstance(event, Preempted)]
