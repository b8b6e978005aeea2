"""The wire adapter of the KV-cache manager: one session of one scheduler at a time.

Owns: which session is the current one. Guarantees: operations reach the core in the order of the stream; a session of
an older scheduler is refused and one of a newer scheduler ends the older, so two schedulers never share a pool.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.common.errors import EngineError, ErrorReason
from services.common.rpc.server import RpcServer
from services.kv_cache.core.manager import KVCacheManager
from services.kv_cache.core.messages import Admit, Commit, KVMessage, KVReply, PoolSpec, Reserve
from treadle.kv_cache.v1 import block_pb2
from treadle.kv_cache.v1 import kv_cache_service_pb2 as pb2
from treadle.kv_cache.v1 import kv_cache_service_pb2_grpc as pb2_grpc


class KVCacheServicer(pb2_grpc.KVCacheServiceServicer):
    """Serves ``treadle.kv_cache.v1.KVCacheService`` from a manager.

    Args:
        manager: The core; this servicer is its only caller.
        epoch: Life of this process.
    """

    def __init__(self, manager: KVCacheManager, epoch: int) -> None:
        self._manager = manager
        self._epoch = epoch
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
            usage = self._manager.usage(pool)
            response.pools.add(
                pool=pool,
                num_blocks=usage.num_blocks,
                num_free=usage.num_free,
                num_cached=usage.num_cached,
                num_held=usage.num_held,
                num_leases=usage.num_leases,
                num_query_tokens=usage.query_tokens,
                num_hit_tokens=usage.hit_tokens,
            )
        return response

    def _begin(self, session: object, scheduler_epoch: int) -> None:
        if scheduler_epoch < self._scheduler_epoch:
            raise _stale("A newer scheduler has used this KV-cache manager.")
        self._scheduler_epoch = scheduler_epoch
        self._session = session
        self._session_ended.clear()
        # Every lease belonged to the earlier session; what its workers hold is void for the new one.
        for pool in self._manager.pools():
            self._manager.close_pool(pool)

    def _apply(self, request: pb2.SessionRequest) -> pb2.SessionResponse:
        return self._to_response(self._manager.apply_batch(_from_request(request)))

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
            )
        return response

    def _block_table(self, handle: int, block_ids: tuple[int, ...]) -> block_pb2.BlockTable:
        pool, block_epoch = self._manager.lease_pool(handle)
        return block_pb2.BlockTable(pool=pool, block_epoch=block_epoch, block_ids=block_ids)


def _from_request(request: pb2.SessionRequest) -> KVMessage:
    return KVMessage(
        sequence=request.sequence,
        open_pools=tuple(
            PoolSpec(spec.pool, spec.num_blocks, spec.block_size, spec.model, spec.weight_version)
            for spec in request.open_pools
        ),
        close_pools=tuple(request.close_pools),
        commits=tuple(
            Commit(commit.handle, commit.num_computed_tokens, tuple(commit.token_ids)) for commit in request.commits
        ),
        releases=tuple(request.release_handles),
        reserves=tuple(Reserve(reserve.handle, reserve.num_blocks) for reserve in request.reserves),
        admits=tuple(
            Admit(admit.handle, admit.pool, admit.cache_scope, tuple(admit.token_ids), admit.num_tokens)
            for admit in request.admits
        ),
    )


def _stale(message: str) -> EngineError:
    return EngineError(ErrorReason.STALE_EPOCH, message)
