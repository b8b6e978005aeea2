"""What the wire does between scheduler and KV-cache manager: the same values, in the other side's types."""

from services.kv_cache import core as kv_cache
from services.scheduler import core as scheduler


def message_to_kv_cache(message: scheduler.KVMessage) -> kv_cache.KVMessage:
    """Translate a message."""
    return kv_cache.KVMessage(
        sequence=message.sequence,
        open_pools=tuple(
            kv_cache.PoolSpec(
                spec.pool,
                spec.num_blocks,
                spec.block_size,
                spec.model,
                spec.weight_version,
                worker_epoch=spec.worker_epoch,
                num_host_blocks=spec.num_host_blocks,
            )
            for spec in message.open_pools
        ),
        close_pools=message.close_pools,
        commits=tuple(
            kv_cache.Commit(commit.handle, commit.num_computed_tokens, commit.token_ids) for commit in message.commits
        ),
        releases=message.releases,
        reserves=tuple(kv_cache.Reserve(reserve.handle, reserve.num_blocks) for reserve in message.reserves),
        admits=tuple(
            kv_cache.Admit(
                admit.handle,
                admit.pool,
                admit.cache_scope,
                admit.token_ids,
                admit.num_tokens,
                admit.request_id,
                admit.tenant,
                admit.max_num_tokens,
                admit.is_reserved_only,
            )
            for admit in message.admits
        ),
    )


def reply_to_scheduler(reply: kv_cache.KVReply) -> scheduler.KVReply:
    """Translate a reply."""
    return scheduler.KVReply(
        sequence=reply.sequence,
        pool_epochs=reply.pool_epochs,
        admitted=tuple(
            scheduler.AdmitGranted(grant.handle, grant.block_epoch, grant.block_ids, grant.num_cached_tokens)
            for grant in reply.admitted
        ),
        reserved=tuple(scheduler.ReserveGranted(grant.handle, grant.block_ids) for grant in reply.reserved),
        denied=tuple(
            scheduler.Denied(
                denied.handle,
                denied.num_free_blocks,
                denied.num_blocks_needed,
                scheduler.DenialReason(denied.reason.value),
                denied.reclaim_handles,
            )
            for denied in reply.denied
        ),
        block_copies=tuple(
            (
                pool,
                tuple(
                    scheduler.BlockCopy(scheduler.CopyDirection(copy.direction.value), copy.block_id, copy.host_slot)
                    for copy in copies
                ),
            )
            for pool, copies in reply.block_copies
        ),
        pool_owners=reply.pool_owners,
    )
