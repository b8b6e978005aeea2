"""The manager over a real socket: sessions that take over, figures, events, quotas, fsck."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from services.common.clock import ManualClock
from services.common.errors import ErrorReason
from services.common.rpc.channel import open_channel
from services.common.rpc.server import RpcServer
from services.common.rpc.status import from_rpc_error
from services.common.rpc.streams import open_stream
from services.kv_cache.config import KVCacheConfig
from services.kv_cache.core import KVCacheManager, ManagerSettings
from services.kv_cache.event_feed import EventFeed
from services.kv_cache.service import KVCacheService
from services.kv_cache.servicer import KVCacheAdminServicer, KVCacheServicer
from treadle.kv_cache.v1 import block_pb2
from treadle.kv_cache.v1 import kv_cache_admin_service_pb2 as admin_pb2
from treadle.kv_cache.v1 import kv_cache_admin_service_pb2_grpc as admin_grpc
from treadle.kv_cache.v1 import kv_cache_service_pb2 as pb2
from treadle.kv_cache.v1 import kv_cache_service_pb2_grpc as pb2_grpc

EPOCH = 70
POOL = "worker-0"


class Client:
    """A scheduler's and an operator's view of one manager."""

    def __init__(self, channel: grpc.aio.Channel, clock: ManualClock) -> None:
        self.kv_cache = pb2_grpc.KVCacheServiceStub(channel)
        self.admin = admin_grpc.KVCacheAdminServiceStub(channel)
        self.clock = clock

    @asynccontextmanager
    async def session(self, scheduler_epoch: int = 1) -> AsyncIterator["Session"]:
        async with open_stream(lambda: self.kv_cache.Session()) as call:
            session = Session(call)
            await session.send(hello=pb2.SchedulerHello(scheduler_epoch=scheduler_epoch))
            yield session

    async def usage(self) -> pb2.PoolUsage:
        (pool,) = (await self.kv_cache.GetUsage(pb2.GetUsageRequest())).pools
        return pool


class Session:
    def __init__(self, call) -> None:
        self.call = call
        self.sequence = 0

    async def send(self, **fields) -> pb2.SessionResponse:
        self.sequence += 1
        await self.call.write(pb2.SessionRequest(sequence=self.sequence, **fields))
        response = await self.call.read()
        assert response.sequence == self.sequence
        return response

    async def open_pool(self, worker_epoch: int = 5, num_blocks: int = 9) -> pb2.SessionResponse:
        spec = pb2.PoolSpec(
            pool=POOL, num_blocks=num_blocks, block_size=2, model="m", weight_version="v", worker_epoch=worker_epoch
        )
        return await self.send(open_pools=[spec])

    async def run_to_end(self, handle: int, token_ids: list[int]) -> int:
        """Admit, compute, release; return the hit in tokens."""
        response = await self.send(admits=[admit(handle, token_ids)])
        commit = pb2.Commit(handle=handle, num_computed_tokens=len(token_ids))
        await self.send(commits=[commit], release_handles=[handle])
        return response.admitted[0].num_cached_tokens


def admit(handle: int, token_ids: list[int], tenant: str = "acme") -> pb2.Admit:
    return pb2.Admit(
        handle=handle,
        pool=POOL,
        cache_scope="s",
        token_ids=token_ids,
        num_tokens=len(token_ids),
        request_id=f"request-{handle}",
        tenant=tenant,
    )


@asynccontextmanager
async def serving(tmp_path: Path, max_events: int = 100) -> AsyncIterator[Client]:
    server, clock = RpcServer("kv_cache", "kv_cache", EPOCH), ManualClock()
    manager = KVCacheManager(EPOCH, settings=ManagerSettings(max_events=max_events))
    feed = EventFeed(manager)
    KVCacheServicer(manager, EPOCH, clock, feed.announce).register_on(server)
    KVCacheAdminServicer(manager, feed, EPOCH, clock).register_on(server)
    address = f"unix:{tmp_path}/s"
    await server.start(address)
    try:
        async with open_channel(address) as channel:
            yield Client(channel, clock)
    finally:
        await server.stop(0)


async def test_resumed_scheduler_hits_what_the_one_before_it_computed(tmp_path: Path) -> None:
    async with serving(tmp_path) as client, client.session(scheduler_epoch=1) as old:
        await old.open_pool()
        assert await old.run_to_end(1, [1, 2, 3, 4, 5]) == 0
        await old.send(admits=[admit(2, [9])])
        async with client.session(scheduler_epoch=2) as new:
            opened = await new.open_pool()
            assert opened.opened_pools[0].block_epoch == EPOCH + 1
            assert (await client.usage()).num_leases == 0
            assert await new.run_to_end(3, [1, 2, 3, 4, 5]) == 4
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await old.send()
    assert from_rpc_error(caught.value, ErrorReason.KV_CACHE_UNAVAILABLE).reason is ErrorReason.STALE_EPOCH


async def test_resumed_scheduler_does_not_find_what_was_in_flight_when_the_one_before_it_died(tmp_path: Path) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7]
    async with serving(tmp_path) as client:
        async with client.session(scheduler_epoch=1) as old:
            await old.open_pool()
            await old.send(admits=[admit(1, prompt)])
            await old.send(commits=[pb2.Commit(handle=1, num_computed_tokens=3)])
        async with client.session(scheduler_epoch=2) as new:
            await new.open_pool()
            assert await new.run_to_end(2, prompt) == 2


async def test_scheduler_that_is_older_than_the_last_one_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        async with client.session(scheduler_epoch=2):
            pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with client.session(scheduler_epoch=1):
                pass
    assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_pool_of_a_restarted_worker_begins_empty(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        for scheduler_epoch, worker_epoch in [(1, 5), (2, 6)]:
            async with client.session(scheduler_epoch) as session:
                await session.open_pool(worker_epoch)
                assert await session.run_to_end(1, [1, 2, 3]) == 0


async def test_usage_tells_figures_of_pool_and_tenant(tmp_path: Path) -> None:
    async with serving(tmp_path) as client, client.session() as session:
        await session.open_pool()
        await session.run_to_end(1, [1, 2, 3])
        client.clock.advance(0.5)
        await session.send(admits=[admit(2, [1, 2, 3])])
        usage = await client.usage()
    assert (usage.num_blocks, usage.num_free, usage.num_cached, usage.num_held) == (9, 6, 0, 2)
    assert (usage.num_lease_slots, usage.num_unused_slots, usage.longest_free_run) == (4, 1, 6)
    assert usage.reuse_gap_ms.total == 500
    assert list(usage.tenants) == [
        pb2.TenantUsage(tenant="acme", num_held=2, num_leases=1, limit=8, num_query_tokens=6, num_hit_tokens=2)
    ]


async def test_reader_of_events_begins_with_a_snapshot_and_then_hears_what_changes(tmp_path: Path) -> None:
    async with serving(tmp_path) as client, client.session() as session:
        await session.open_pool()
        await session.run_to_end(1, [1, 2, 3])
        async with open_stream(lambda: client.admin.WatchEvents(admin_pb2.WatchEventsRequest())) as call:
            snapshot = await call.read()
            await session.run_to_end(2, [1, 2, 4, 5])
            live = await call.read()
            await session.send(close_pools=[POOL])
            cleared = await call.read()
    assert (snapshot.kv_cache_epoch, snapshot.is_resync, snapshot.next_sequence) == (EPOCH, True, 2)
    (first,) = snapshot.events
    (second,) = live.events
    assert second.stored.parent_hash == first.stored.block_hash
    assert (live.is_resync, live.next_sequence) == (False, 3)
    assert cleared.events[0].WhichOneof("event") == "cleared"


async def test_reader_that_was_cut_off_replays_from_its_number_in_the_same_life_only(tmp_path: Path) -> None:
    async with serving(tmp_path) as client, client.session() as session:
        await session.open_pool()
        for handle, token_id in [(1, 1), (2, 2), (3, 3)]:
            await session.run_to_end(handle, [token_id, token_id])
        answers = []
        for epoch, sequence in [(EPOCH, 2), (EPOCH - 1, 2), (EPOCH, 9)]:
            request = admin_pb2.WatchEventsRequest(kv_cache_epoch=epoch, from_sequence=sequence)
            async with open_stream(lambda request=request: client.admin.WatchEvents(request)) as call:
                answer = await call.read()
            answers.append((answer.is_resync, len(answer.events), answer.next_sequence))
    assert answers == [(False, 2, 4), (True, 3, 4), (True, 3, 4)]


async def test_reader_that_the_log_has_left_behind_is_told_to_resync(tmp_path: Path) -> None:
    async with serving(tmp_path, max_events=2) as client, client.session() as session:
        await session.open_pool()
        async with open_stream(lambda: client.admin.WatchEvents(admin_pb2.WatchEventsRequest())) as call:
            first = await call.read()
            # One message, three events, a log of two.
            await session.send(admits=[admit(1, [1, 2, 3, 4, 5, 6])])
            await session.send(commits=[pb2.Commit(handle=1, num_computed_tokens=6)])
            second = await call.read()
    assert (first.is_resync, len(first.events), first.next_sequence) == (True, 0, 1)
    assert (second.is_resync, len(second.events), second.next_sequence) == (True, 3, 4)


async def test_quotas_that_are_set_live_bind_the_next_ask(tmp_path: Path) -> None:
    rule = admin_pb2.QuotaRule(model="*", tenant="acme", reserved_ratio=0.0, limit_ratio=0.25)
    async with serving(tmp_path) as client, client.session() as session:
        await session.open_pool()
        await client.admin.SetQuotas(admin_pb2.SetQuotasRequest(rules=[rule]))
        assert list((await client.admin.GetQuotas(admin_pb2.GetQuotasRequest())).rules) == [rule]
        response = await session.send(admits=[admit(1, [1, 2, 3, 4]), admit(2, [1])])
        twice = admin_pb2.SetQuotasRequest(rules=[rule, rule])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.admin.SetQuotas(twice)
        assert list((await client.admin.GetQuotas(admin_pb2.GetQuotasRequest())).rules) == [rule]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (denied,) = response.denied
    assert denied == pb2.Denied(handle=2, num_blocks_needed=1, num_blocks_free=0, reason=pb2.DENIAL_REASON_TENANT_LIMIT)
    assert list(response.pool_owners) == [pb2.PoolOwners(pool="worker-0")]


async def test_fsck_reports_a_leak_and_releases_it_only_when_asked_to(tmp_path: Path) -> None:
    view = admin_pb2.HolderView(holder="scheduler", pool=POOL, handles=[1, 9], is_owner=True)
    async with serving(tmp_path) as client, client.session() as session:
        await session.open_pool()
        await session.send(admits=[admit(1, [1]), admit(2, [1, 2, 3])])
        client.clock.advance(2)
        found = await client.admin.Fsck(admin_pb2.FsckRequest(views=[view], min_age_ms=1000))
        assert [lease.handle for lease in (await client.admin.ListLeases(admin_pb2.ListLeasesRequest())).leases] == [
            1,
            2,
        ]
        repaired = await client.admin.Fsck(admin_pb2.FsckRequest(views=[view], repair=True))
        after = await client.admin.Fsck(admin_pb2.FsckRequest(views=[view]))
        usage = await client.usage()
    leaked = admin_pb2.Lease(
        handle=2, pool=POOL, request_id="request-2", tenant="acme", num_blocks=2, num_tokens=3, age_ms=2000
    )
    dangling = admin_pb2.DanglingHandle(holder="scheduler", pool=POOL, handle=9)
    assert found == admin_pb2.FsckResponse(leaked=[leaked], dangling=[dangling])
    assert repaired == admin_pb2.FsckResponse(leaked=[leaked], dangling=[dangling], is_repaired=True)
    assert after == admin_pb2.FsckResponse(dangling=[dangling])
    assert usage.num_held == 1


async def test_repair_of_named_leaks_leaves_the_others(tmp_path: Path) -> None:
    view = admin_pb2.HolderView(holder="scheduler", pool=POOL, handles=[1], is_owner=True)
    async with serving(tmp_path) as client, client.session() as session:
        await session.open_pool()
        await session.send(admits=[admit(handle, [handle]) for handle in (1, 2, 3)])
        repaired = await client.admin.Fsck(admin_pb2.FsckRequest(views=[view], repair=True, repair_handles=[1, 2]))
        answer = await client.admin.ListLeases(admin_pb2.ListLeasesRequest())
    assert repaired.is_repaired
    assert [lease.handle for lease in repaired.leaked] == [2, 3]
    # The scheduler knows 1, and nobody named 3.
    assert [lease.handle for lease in answer.leases] == [1, 3]
    assert answer.kv_cache_epoch == EPOCH


async def test_service_reloads_its_quotas_file_and_keeps_the_old_quotas_when_it_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "quotas.yaml"
    path.write_text("quotas: [{tenant: acme, limit: 0.5}]")
    server = RpcServer("kv_cache", "kv_cache", EPOCH)
    service = KVCacheService(KVCacheConfig(listen="unix:unused", quotas_file=str(path)), server, EPOCH)
    address = f"unix:{tmp_path}/s"
    await server.start(address)
    limits = []
    try:
        async with open_channel(address) as channel:
            admin = admin_grpc.KVCacheAdminServiceStub(channel)
            for text in ("quotas: [{tenant: acme, limit: 0.25}]", "quotas: [nonsense]"):
                (rule,) = (await admin.GetQuotas(admin_pb2.GetQuotasRequest())).rules
                limits.append(rule.limit_ratio)
                path.write_text(text)
                service.reload_quotas()
            (rule,) = (await admin.GetQuotas(admin_pb2.GetQuotasRequest())).rules
            limits.append(rule.limit_ratio)
    finally:
        await server.stop(0)
    assert limits == [0.5, 0.25, 0.25]


async def test_copies_between_the_tiers_are_told_with_the_grants_that_need_them(tmp_path: Path) -> None:
    async with serving(tmp_path) as client, client.session(scheduler_epoch=1) as session:
        spec = pb2.PoolSpec(
            pool=POOL, num_blocks=4, block_size=2, model="m", weight_version="v", worker_epoch=5, num_host_blocks=8
        )
        await session.send(open_pools=[spec])
        await session.run_to_end(1, [1, 2, 3, 4, 5])
        response = await session.send(admits=[admit(2, [6, 7, 8, 9, 10])])
        (in_pool,) = response.block_copies
        assert in_pool.pool == POOL
        assert [(copy.direction, copy.block_id, copy.host_slot) for copy in in_pool.copies] == [
            (block_pb2.COPY_DIRECTION_TO_HOST, 2, 0),
            (block_pb2.COPY_DIRECTION_TO_HOST, 1, 1),
        ]
        usage = await client.usage()
        assert (usage.num_host_blocks, usage.num_host_cached, usage.num_restored) == (8, 2, 0)
