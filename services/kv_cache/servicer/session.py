"""The scheduler's side of the KV-cache manager: one session of one scheduler at a time, and the pools' figures.

Owns: which session is the current one. Guarantees: operations reach the core in the order of the stream; a session of
an older scheduler is refused and one of a newer scheduler ends the older, so two schedulers never share a pool.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from services.common.clock import Clock, SystemClock
from services.common.errors import EngineError, ErrorReason
from services.common.rpc.server import RpcServer
from services.kv_cache.core.figures import Histogram
from services.kv_cache.core.ledger import DenialReason
from services.kv_cache.core.manager import KVCacheManager
from services.kv_cache.core.messages import Admit, Commit, CopyDirection, KVMessage, KVReply, PoolSpec, Reserve
from services.kv_cache.core.pool import Pool
from treadle.kv_cache.v1 import block_pb2
from treadle.kv_cache.v1 import kv_cache_service_pb2 as pb2
from treadle.kv_cache.v1 import kv_cache_service_pb2_grpc as pb2_grpc

_DENIAL_REASONS = {
    DenialReason.CAPACITY: pb2.DENIAL_REASON_CAPACITY,
    DenialReason.TENANT_LIMIT: pb2.DENIAL_REASON_TENANT_LIMIT,
    DenialReason.NEVER_FITS: pb2.DENIAL_REASON_NEVER_FITS,
}

_COPY_DIRECTIONS = {
    CopyDirection.TO_HOST: block_pb2.COPY_DIRECTION_TO_HOST,
    CopyDirection.TO_DEVICE: block_pb2.COPY_DIRECTION_TO_DEVICE,
}


class KVCacheServicer(pb2_grpc.KVCacheServiceServicer):
    """Serves ``treadle.kv_cache.v1.KVCacheService`` from a manager.

    Args:
        manager: The core; nobody else changes its leases, but for repairs.
        epoch: Life of this process.
        clock: Ages are measured with it.
        on_change: Called after each message, for who follows the events.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        epoch: int,
        clock: Clock | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._manager = manager
        self._epoch = epoch
        self._clock = clock if clock is not None else SystemClock()
        self._on_change = on_change
        self._scheduler_epoch = 0
        self._session: object | None = None
        self._session_ended = asyncio.Event()
        self._session_ended.set()

    def register_on(self, server: RpcServer) -> None:
        """Serve on ``server``, and let its reflection tell so."""
        pb2_grpc.add_KVCacheServiceServicer_to_server(self, server.server)
        server.add_service_names([pb2.DESCRIPTOR.services_by_name["KVCacheService"].full_name])

    async def session_ended(self) -> None:
        """Wait until no scheduler is connected."""
        await self._session_ended.wait()

    async def Session(
        self, request_iterator: AsyncIterator[pb2.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Apply one message after the other."""
        session = object()
        try:
            async for request in request_iterator:
                if request.HasField("hello"):
                    self._begin(session, request.hello.scheduler_epoch)
                if self._session is not session:
                    raise _stale("Another scheduler has taken over this KV-cache manager.")
                await context.write(self._apply(request))
        finally:
            if self._session is session:
                self._session = None
                self._session_ended.set()

    async def GetUsage(self, request: pb2.GetUsageRequest, context: object) -> pb2.GetUsageResponse:  # noqa: ARG002
        """Return the figures of every pool."""
        response = pb2.GetUsageResponse()
        for pool in self._manager.pools():
            _fill_usage(response.pools.add(pool=pool), self._manager.pool(pool))
        return response

    def _begin(self, session: object, scheduler_epoch: int) -> None:
        if scheduler_epoch < self._scheduler_epoch:
            raise _stale("A newer scheduler has used this KV-cache manager.")
        self._scheduler_epoch = scheduler_epoch
        self._session = session
        self._session_ended.clear()
        # Every lease belonged to the earlier session. Its scheduler's plans that a worker still has write nothing that
        # is cached, and are executed before any plan of the new one, so what is cached may stay.
        self._manager.suspend_pools()
        self._on_change()

    def _apply(self, request: pb2.SessionRequest) -> pb2.SessionResponse:
        now_ms = int(self._clock.monotonic_s() * 1000)
        response = self._to_response(self._manager.apply_batch(_from_request(request), now_ms))
        self._on_change()
        return response

    def _to_response(self, reply: KVReply) -> pb2.SessionResponse:
        response = pb2.SessionResponse(sequence=reply.sequence, kv_cache_epoch=self._epoch)
        for pool, block_epoch in reply.pool_epochs:
            response.opened_pools.add(pool=pool, block_epoch=block_epoch)
        for admitted in reply.admitted:
            response.admitted.add(
                handle=admitted.handle,
                block_table=self._block_table(admitted.handle, admitted.block_ids),
                num_cached_tokens=admitted.num_cached_tokens,
            )
        for reserved in reply.reserved:
            response.reserved.add(
                handle=reserved.handle, added_blocks=self._block_table(reserved.handle, reserved.block_ids)
            )
        for denied in reply.denied:
            response.denied.add(
                handle=denied.handle,
                num_blocks_needed=denied.num_blocks_needed,
                num_blocks_free=denied.num_free_blocks,
                reason=_DENIAL_REASONS[denied.reason],
                reclaim_handles=denied.reclaim_handles,
            )
        for pool, copies in reply.block_copies:
            message = response.block_copies.add(pool=pool)
            for copy in copies:
                direction = _COPY_DIRECTIONS[copy.direction]
                message.copies.add(direction=direction, block_id=copy.block_id, host_slot=copy.host_slot)
        for pool, tenants in reply.pool_owners:
            response.pool_owners.add(pool=pool, tenants=tenants)
        return response

    def _block_table(self, handle: int, block_ids: tuple[int, ...]) -> block_pb2.BlockTable:
        pool, block_epoch = self._manager.lease_pool(handle)
        return block_pb2.BlockTable(pool=pool, block_epoch=block_epoch, block_ids=block_ids)


def _from_request(request: pb2.SessionRequest) -> KVMessage:
    return KVMessage(
        sequence=request.sequence,
        open_pools=tuple(
            PoolSpec(
                spec.pool,
                spec.num_blocks,
                spec.block_size,
                spec.model,
                spec.weight_version,
                spec.worker_epoch,
                spec.num_host_blocks,
            )
            for spec in request.open_pools
        ),
        close_pools=tuple(request.close_pools),
        commits=tuple(
            Commit(commit.handle, commit.num_computed_tokens, tuple(commit.token_ids)) for commit in request.commits
        ),
        releases=tuple(request.release_handles),
        reserves=tuple(Reserve(reserve.handle, reserve.num_blocks) for reserve in request.reserves),
        admits=tuple(
            Admit(
                admit.handle,
                admit.pool,
                admit.cache_scope,
                tuple(admit.token_ids),
                admit.num_tokens,
                admit.request_id,
                admit.tenant,
                admit.max_num_tokens,
                admit.is_reserved_only,
            )
            for admit in request.admits
        ),
    )


def _fill_usage(message: pb2.PoolUsage, pool: Pool) -> None:
    usage, fragmentation = pool.usage(), pool.fragmentation()
    message.num_blocks = usage.num_blocks
    message.num_free = usage.num_free
    message.num_cached = usage.num_cached
    message.num_held = usage.num_held
    message.num_leases = usage.num_leases
    message.num_query_tokens = usage.query_tokens
    message.num_hit_tokens = usage.hit_tokens
    message.num_host_blocks = usage.num_host_blocks
    message.num_host_cached = usage.num_host_cached
    message.num_restored = usage.num_restored
    message.num_protected = pool.block_pool.free_list.num_protected
    message.num_lease_slots = fragmentation.num_lease_slots
    message.num_unused_slots = fragmentation.num_unused_slots
    message.num_free_runs = fragmentation.num_free_runs
    message.longest_free_run = fragmentation.longest_free_run
    _fill_histogram(message.free_run_blocks, fragmentation.free_runs)
    _fill_histogram(message.block_lifetime_ms, pool.ages.lifetime_ms)
    _fill_histogram(message.idle_before_evict_ms, pool.ages.idle_before_evict_ms)
    _fill_histogram(message.reuse_gap_ms, pool.ages.reuse_gap_ms)
    for account in pool.ledger.accounts:
        message.tenants.add(
            tenant=account.tenant,
            num_held=account.num_held,
            num_leases=account.num_leases,
            num_reserved=account.num_reserved,
            limit=account.limit,
            num_query_tokens=account.query_tokens,
            num_hit_tokens=account.hit_tokens,
        )


def _fill_histogram(message: pb2.Histogram, histogram: Histogram) -> None:
    message.counts.extend(histogram.counts)
    message.total = histogram.total


def _stale(message: str) -> EngineError:
    return EngineError(ErrorReason.STALE_EPOCH, message)
