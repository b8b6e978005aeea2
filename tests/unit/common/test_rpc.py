"""Servers, channels, streams and statuses of the mesh, over real loopback sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from services.common.errors import EngineError, ErrorReason, InvariantError
from services.common.rpc.channel import CLIENT_OPTIONS, SERVER_OPTIONS, open_channel
from services.common.rpc.outbox import Outbox
from services.common.rpc.server import RpcServer
from services.common.rpc.status import from_rpc_error, from_status, to_status
from services.common.rpc.streams import exchange, open_stream, read_greeting, write_message
from services.common.tasks import Backoff, keep_up
from treadle.common.v1 import service_info_service_pb2 as info_pb2
from treadle.common.v1 import service_info_service_pb2_grpc as info_grpc
from treadle.kv_cache.v1 import kv_cache_service_pb2 as kv_pb2
from treadle.kv_cache.v1 import kv_cache_service_pb2_grpc as kv_grpc

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


class ScriptedServicer(kv_grpc.KVCacheServiceServicer):
    """Echoes sequences; fails where the test says so; knows when its handler ended."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.ended = asyncio.Event()

    async def Session(self, request_iterator, context):
        try:
            async for request in request_iterator:
                if self.failure is not None:
                    raise self.failure
                await context.write(kv_pb2.SessionResponse(sequence=request.sequence))
        finally:
            self.ended.set()

    async def GetUsage(self, request, context):
        if self.failure is not None:
            raise self.failure
        return kv_pb2.GetUsageResponse()


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[RpcServer, ScriptedServicer, str]]:
    server = RpcServer("kv_cache", "kv_cache", epoch=7)
    servicer = ScriptedServicer()
    kv_grpc.add_KVCacheServiceServicer_to_server(servicer, server.server)
    server.add_service_names(["treadle.kv_cache.v1.KVCacheService"])
    address = f"unix:{tmp_path}/s"
    await server.start(address)
    try:
        yield server, servicer, address
    finally:
        await server.stop(0)


async def test_health_check_and_watch_tell_the_same_for_both_names(tmp_path: Path):
    async with serving(tmp_path) as (server, _, address), open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def check() -> list[int]:
            names = ("", "kv_cache")
            return [(await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names]

        async with open_stream(lambda: stub.Watch(health_pb2.HealthCheckRequest(service="kv_cache"))) as watch:
            seen = [(await watch.read()).status]
            assert await check() == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2
            await server.set_ready(is_ready=True)
            seen.append((await watch.read()).status)
            assert await check() == [health_pb2.HealthCheckResponse.SERVING] * 2
            await server.begin_drain()
            seen.append((await watch.read()).status)
            await server.set_ready(is_ready=True)
            assert await check() == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2
    not_serving, is_serving = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING
    assert seen == [not_serving, is_serving, not_serving]


async def test_health_answers_not_found_when_the_service_is_unknown(tmp_path: Path):
    async with serving(tmp_path) as (_, _, address), open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="worker"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_own_and_standard_services(tmp_path: Path):
    async with serving(tmp_path) as (_, _, address), open_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async with open_stream(lambda: stub.ServerReflectionInfo()) as call:
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            response = await call.read()
    names = {service.name for service in response.list_services_response.service}
    assert names == {
        "treadle.kv_cache.v1.KVCacheService",
        "treadle.common.v1.ServiceInfoService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_service_info_names_the_process(tmp_path: Path):
    async with serving(tmp_path) as (_, _, address), open_channel(address) as channel:
        info = await info_grpc.ServiceInfoServiceStub(channel).GetServiceInfo(info_pb2.GetServiceInfoRequest())
    assert (info.name, info.epoch) == ("kv_cache", 7)


async def test_server_refuses_an_address_that_is_taken():
    first = RpcServer("a", "kv_cache", epoch=1)
    port = first.server.add_insecure_port("127.0.0.1:0")
    await first.server.start()
    second = RpcServer("b", "kv_cache", epoch=2)
    with pytest.raises(EngineError, match="cannot listen"):
        await second.start(f"127.0.0.1:{port}")
    await first.stop(0)


async def test_engine_error_travels_with_reason_and_metadata(tmp_path: Path):
    async with serving(tmp_path) as (_, servicer, address), open_channel(address) as channel:
        servicer.failure = EngineError(ErrorReason.QUEUE_FULL, "full", retry_after_s="2.5", limit="8")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await kv_grpc.KVCacheServiceStub(channel).GetUsage(kv_pb2.GetUsageRequest())
    error = from_rpc_error(caught.value, ErrorReason.KV_CACHE_UNAVAILABLE)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (error.reason, error.message, error.metadata) == (
        ErrorReason.QUEUE_FULL,
        "full",
        {"retry_after_s": "2.5", "limit": "8"},
    )
    status = rpc_status.from_call(caught.value)
    infos = [detail for detail in status.details if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    retry = error_details_pb2.RetryInfo()
    assert len(infos) == 1
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 2500


async def test_unexpected_exception_becomes_internal_without_its_text(tmp_path: Path):
    async with serving(tmp_path) as (_, servicer, address), open_channel(address) as channel:
        servicer.failure = ValueError("secret")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await kv_grpc.KVCacheServiceStub(channel).GetUsage(kv_pb2.GetUsageRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()


@pytest.mark.parametrize("reason", list(ErrorReason))
def test_status_round_trip_is_the_identity(reason: ErrorReason):
    error = from_status(to_status(EngineError(reason, "text", field="x")), ErrorReason.STEP_FAILED)
    assert (error.reason, error.message, error.metadata) == (reason, "text", {"field": "x"})


def test_status_of_somebody_else_becomes_the_fallback():
    status = to_status(EngineError(ErrorReason.QUEUE_FULL, "text"))
    del status.details[:]
    assert from_status(status, ErrorReason.WORKER_UNAVAILABLE).reason is ErrorReason.WORKER_UNAVAILABLE


async def test_peer_that_is_not_there_is_unavailable(tmp_path: Path):
    async with open_channel(f"unix:{tmp_path}/nobody") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await kv_grpc.KVCacheServiceStub(channel).GetUsage(kv_pb2.GetUsageRequest(), timeout=1)
    unavailable = ErrorReason.KV_CACHE_UNAVAILABLE
    assert from_rpc_error(caught.value, unavailable).reason in (unavailable, ErrorReason.DEADLINE_EXCEEDED)


async def test_open_stream_cancels_the_call_when_the_body_raises(tmp_path: Path):
    async with serving(tmp_path) as (_, servicer, address), open_channel(address) as channel:
        stub = kv_grpc.KVCacheServiceStub(channel)

        async def fail_in_the_body() -> None:
            async with open_stream(lambda: stub.Session()) as call:
                await write_message(call, kv_pb2.SessionRequest(sequence=1), ErrorReason.KV_CACHE_UNAVAILABLE)
                assert (await read_greeting(call, ErrorReason.KV_CACHE_UNAVAILABLE)).sequence == 1
                raise RuntimeError("body")

        with pytest.raises(RuntimeError, match="body"):
            await fail_in_the_body()
        async with asyncio.timeout(2):
            await servicer.ended.wait()


async def test_exchange_sends_what_gathers_and_raises_what_the_peer_says(tmp_path: Path):
    async with serving(tmp_path) as (_, servicer, address), open_channel(address) as channel:
        stub = kv_grpc.KVCacheServiceStub(channel)
        waiting = [3, 2, 1]
        outbox = Outbox(lambda: kv_pb2.SessionRequest(sequence=waiting.pop()) if waiting else None)
        seen: list[int] = []

        def on_message(response: kv_pb2.SessionResponse) -> None:
            seen.append(response.sequence)
            if response.sequence == 3:
                servicer.failure = EngineError(ErrorReason.STALE_EPOCH, "too old")
                waiting.append(4)
                outbox.notify()

        async with open_stream(lambda: stub.Session()) as call:
            with pytest.raises(EngineError) as caught:
                await exchange(call, outbox, on_message, ErrorReason.KV_CACHE_UNAVAILABLE)
    assert seen == [1, 2, 3]
    assert caught.value.reason is ErrorReason.STALE_EPOCH


async def test_keep_up_tries_again_after_errors_but_not_after_a_broken_invariant():
    lives: list[int] = []

    async def life(on_up) -> None:
        lives.append(len(lives))
        if len(lives) == 3:
            raise InvariantError("broken")
        if len(lives) == 2:
            on_up()
            return
        raise EngineError(ErrorReason.WORKER_UNAVAILABLE, "away")

    with pytest.raises(InvariantError):
        await keep_up("worker-0", life, Backoff(first_s=0.0, last_s=0.0))
    assert lives == [0, 1, 2]


@pytest.mark.parametrize("num_failures", [1, 2, 5, 100])
def test_backoff_doubles_up_to_its_bound_with_jitter_below(num_failures: int):
    backoff = Backoff(first_s=0.1, last_s=2.0)
    longest = min(2.0, 0.1 * 2 ** (num_failures - 1))
    assert longest / 2 <= backoff.delay_s(num_failures) <= longest


def test_keepalive_settings_of_both_sides_agree():
    # gRPC ignores a misspelt key silently, so the spelling is pinned here.
    client, server = dict(CLIENT_OPTIONS), dict(SERVER_OPTIONS)
    assert server["grpc.http2.min_recv_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]
    assert client["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1
    known = {
        "grpc.max_send_message_length",
        "grpc.max_receive_message_length",
        "grpc.keepalive_time_ms",
        "grpc.keepalive_timeout_ms",
        "grpc.keepalive_permit_without_calls",
        "grpc.http2.max_pings_without_data",
        "grpc.http2.min_recv_ping_interval_without_data_ms",
        "grpc.initial_reconnect_backoff_ms",
        "grpc.min_reconnect_backoff_ms",
        "grpc.max_reconnect_backoff_ms",
        "grpc.use_local_subchannel_pool",
        "grpc.enable_http_proxy",
        "grpc.so_reuseport",
    }
    assert client.keys() | server.keys() <= known


async def test_messages_above_four_megabytes_pass(tmp_path: Path):
    async with serving(tmp_path) as (_, _, address), open_channel(address) as channel:
        stub = kv_grpc.KVCacheServiceStub(channel)
        async with open_stream(lambda: stub.Session()) as call:
            message = kv_pb2.SessionRequest(sequence=1, close_pools=["x" * 5_000_000])
            await write_message(call, message, ErrorReason.KV_CACHE_UNAVAILABLE)
            assert (await read_greeting(call, ErrorReason.KV_CACHE_UNAVAILABLE)).sequence == 1


async def test_peer_that_is_slow_to_answer_a_connection_is_not_taken_for_dead(tmp_path: Path):
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()
        await writer.wait_closed()

    relayed = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []
    async with serving(tmp_path) as (_, _, address):

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.3)  # as a process that does not get the processor
            peer_reader, peer_writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
            writers.extend((writer, peer_writer))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(pump(reader, peer_writer))
                tasks.create_task(pump(peer_reader, writer))
            relayed.set()

        async with await asyncio.start_unix_server(relay, f"{tmp_path}/slow") as slow:
            async with open_channel(f"unix:{tmp_path}/slow") as channel:
                answer = await kv_grpc.KVCacheServiceStub(channel).GetUsage(kv_pb2.GetUsageRequest(), timeout=10)
            for writer in writers:
                writer.close()
            async with asyncio.timeout(10):
                await relayed.wait()
            slow.close()
    assert answer == kv_pb2.GetUsageResponse()
