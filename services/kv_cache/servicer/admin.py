"""What operators and routers ask: events, quotas, leases, fsck.

Guarantees: nothing here takes part in a step, and a reader of events that does not read is never waited for.
"""

from contextlib import aclosing
from typing import Any

import grpc

from services.common.clock import Clock
from services.common.errors import EngineError, ErrorReason
from services.common.rpc.server import RpcServer
from services.kv_cache.core.audit import HolderView, LeaseInfo, audit, list_leases
from services.kv_cache.core.events import BlockRemoved, BlockStored, Event
from services.kv_cache.core.manager import KVCacheManager
from services.kv_cache.core.quotas import QuotaRule, Quotas
from services.kv_cache.event_feed import EventFeed
from treadle.kv_cache.v1 import kv_cache_admin_service_pb2 as pb2
from treadle.kv_cache.v1 import kv_cache_admin_service_pb2_grpc as pb2_grpc


class KVCacheAdminServicer(pb2_grpc.KVCacheAdminServiceServicer):
    """Serves ``treadle.kv_cache.v1.KVCacheAdminService`` from a manager.

    Args:
        manager: The core.
        feed: Its events.
        epoch: Life of this process.
        clock: Ages of leases are measured with it; the same as the session's.
    """

    def __init__(self, manager: KVCacheManager, feed: EventFeed, epoch: int, clock: Clock) -> None:
        self._manager = manager
        self._feed = feed
        self._epoch = epoch
        self._clock = clock

    def register_on(self, server: RpcServer) -> None:
        """Serve on ``server``, and let its reflection tell so."""
        pb2_grpc.add_KVCacheAdminServiceServicer_to_server(self, server.server)
        server.add_service_names([pb2.DESCRIPTOR.services_by_name["KVCacheAdminService"].full_name])

    async def WatchEvents(self, request: pb2.WatchEventsRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Send events until the caller cancels; flow control sets the pace."""
        is_known_life = request.kv_cache_epoch == self._epoch
        async with aclosing(self._feed.follow(request.from_sequence if is_known_life else None)) as batches:
            async for batch in batches:
                response = pb2.WatchEventsResponse(
                    kv_cache_epoch=self._epoch, is_resync=batch.is_resync, next_sequence=batch.next_sequence
                )
                for event in batch.events:
                    _add_event(response, event)
                await context.write(response)

    async def SetQuotas(self, request: pb2.SetQuotasRequest, context: object) -> pb2.SetQuotasResponse:  # noqa: ARG002
        """Replace the quotas."""
        rules = tuple(
            QuotaRule(
                rule.model,
                rule.tenant,
                rule.reserved_ratio,
                rule.limit_ratio if rule.HasField("limit_ratio") else 1.0,
            )
            for rule in request.rules
        )
        self._manager.set_quotas(Quotas(rules))
        return pb2.SetQuotasResponse()

    async def GetQuotas(self, request: pb2.GetQuotasRequest, context: object) -> pb2.GetQuotasResponse:  # noqa: ARG002
        """Return the quotas in force."""
        response = pb2.GetQuotasResponse()
        for rule in self._manager.quotas.rules:
            response.rules.add(
                model=rule.model,
                tenant=rule.tenant,
                reserved_ratio=rule.reserved_ratio,
                limit_ratio=rule.limit_ratio,
            )
        return response

    async def ListLeases(
        self,
        request: pb2.ListLeasesRequest,  # noqa: ARG002
        context: object,  # noqa: ARG002
    ) -> pb2.ListLeasesResponse:
        """Return every lease."""
        leases = map(_to_lease, list_leases(self._manager, self._now_ms()))
        return pb2.ListLeasesResponse(leases=leases, kv_cache_epoch=self._epoch)

    async def Fsck(self, request: pb2.FsckRequest, context: object) -> pb2.FsckResponse:  # noqa: ARG002
        """Compare, and release what is leaked if asked to."""
        views = [HolderView(view.holder, view.pool, frozenset(view.handles), view.is_owner) for view in request.views]
        if not all(view.holder and view.pool for view in views):
            raise EngineError(ErrorReason.INVALID_REQUEST, "a view names its holder and its pool", field="views")
        report = audit(self._manager, views, self._now_ms(), request.min_age_ms)
        # With a broken law no release is known to be right.
        is_repaired = request.repair and report.broken_law is None
        if is_repaired:
            chosen = frozenset(request.repair_handles)
            for lease in report.leaked:
                if not chosen or lease.handle in chosen:
                    self._manager.release(lease.handle)
        response = pb2.FsckResponse(
            leaked=map(_to_lease, report.leaked), broken_law=report.broken_law, is_repaired=is_repaired
        )
        for found in report.dangling:
            response.dangling.add(holder=found.holder, pool=found.pool, handle=found.handle)
        return response

    def _now_ms(self) -> int:
        return int(self._clock.monotonic_s() * 1000)


def _add_event(response: pb2.WatchEventsResponse, event: Event) -> None:
    message = response.events.add(pool=event.pool)
    match event:
        case BlockStored():
            message.stored.block_hash = event.block_hash
            message.stored.parent_hash = event.parent_hash
        case BlockRemoved():
            message.removed.block_hash = event.block_hash
        case _:
            message.cleared.SetInParent()


def _to_lease(lease: LeaseInfo) -> pb2.Lease:
    return pb2.Lease(
        handle=lease.handle,
        pool=lease.pool,
        request_id=lease.request_id,
        tenant=lease.tenant,
        num_blocks=lease.num_blocks,
        num_tokens=lease.num_tokens,
        age_ms=lease.age_ms,
    )
