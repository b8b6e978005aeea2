"""What the services of a mesh hold of requests, as they say themselves: all zero when nothing runs."""

import re
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any, Final

import grpc

from treadle.kv_cache.v1 import kv_cache_service_pb2, kv_cache_service_pb2_grpc
from treadle.scheduler.v1 import scheduler_service_pb2, scheduler_service_pb2_grpc
from treadle.worker.v1 import worker_service_pb2, worker_service_pb2_grpc

_DEADLINE_S: Final = 5.0
_RUNNING_STREAMS: Final = re.compile(r"^treadle_gateway_running_streams(?:\{.*\})? (\S+)$", re.MULTILINE)


def read_holdings(services: Iterable[Mapping[str, Any]], base_url: str) -> dict[str, int]:
    """Ask every service that ``treadle status`` names; of a gateway, the one that serves ``base_url``.

    Returns:
        By service: streams of the gateway, requests of scheduler and workers, leases and held blocks of kv_cache.
    """
    held = {}
    for service in services:
        name, address = str(service["name"]), str(service["address"])
        if name.startswith("gateway"):
            held[name] = _running_streams(base_url)
            continue
        with grpc.insecure_channel(address) as channel:
            if name.startswith("worker"):
                held[name] = _worker_requests(channel)
            elif name.startswith("scheduler"):
                held[name] = _scheduler_requests(channel)
            else:
                held[name] = _leases_and_blocks(channel)
    return held


def _running_streams(base_url: str) -> int:
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=_DEADLINE_S) as response:
        return round(sum(float(value) for value in _RUNNING_STREAMS.findall(response.read().decode())))


def _worker_requests(channel: grpc.Channel) -> int:
    stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
    return int(stub.GetState(worker_service_pb2.GetStateRequest(), timeout=_DEADLINE_S).num_requests)


def _scheduler_requests(channel: grpc.Channel) -> int:
    stub = scheduler_service_pb2_grpc.SchedulerServiceStub(channel)
    load = stub.GetLoad(scheduler_service_pb2.GetLoadRequest(), timeout=_DEADLINE_S)
    return int(load.num_waiting + load.num_running)


def _leases_and_blocks(channel: grpc.Channel) -> int:
    stub = kv_cache_service_pb2_grpc.KVCacheServiceStub(channel)
    usage = stub.GetUsage(kv_cache_service_pb2.GetUsageRequest(), timeout=_DEADLINE_S)
    return sum(pool.num_leases + pool.num_held for pool in usage.pools)
