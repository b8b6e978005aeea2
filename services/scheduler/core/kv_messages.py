"""What the scheduler says to the KV-cache manager and hears from it, in the scheduler's own words.

The manager has its own copy of these; the wire joins the two. A handle is a uint64 that names one admission of one
request to one worker; a request that was preempted gets a new one when it is admitted again.
"""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The block pool of a worker. ``num_blocks`` counts the null block; ``num_host_blocks`` are its host tier.

    ``worker_epoch`` is the life of the worker: what the manager has cached of that life it may keep, over the loss of a
    session or of a scheduler, since the worker's memory holds it still; 0 keeps nothing.
    """

    pool: str
    num_blocks: int
    block_size: int
    model: str
    weight_version: str
    num_host_blocks: int = 0
    worker_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Admit:
    """Ask for a lease with slots for ``num_tokens`` positions; ``token_ids`` are all tokens known so far.

    ``max_num_tokens`` are the positions that the request may grow to. With ``is_reserved_only`` it is to be granted as
    what is owed to the tenant or not at all, since a request that goes before it was denied.
    """

    handle: int
    pool: str
    cache_scope: str
    token_ids: tuple[int, ...]
    num_tokens: int
    request_id: str = ""
    tenant: str = ""
    max_num_tokens: int = 0
    is_reserved_only: bool = False


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask for ``num_blocks`` more blocks."""

    handle: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Tell that KV is present below ``num_computed_tokens``; ``token_ids`` are those not told to the manager yet."""

    handle: int
    num_computed_tokens: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdmitGranted:
    """A lease with its block table; the first ``num_cached_tokens`` positions hold KV already."""

    handle: int
    block_epoch: int
    block_ids: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ReserveGranted:
    """Blocks to append to the block table."""

    handle: int
    block_ids: tuple[int, ...]


class DenialReason(Enum):
    """Why blocks were denied, and so what helps."""

    CAPACITY = "capacity"  # the pool has too few
    TENANT_LIMIT = "tenant_limit"  # its tenant is at its limit; others may pass
    NEVER_FITS = "never_fits"  # more than its tenant may ever hold there


@dataclass(frozen=True, slots=True)
class Denied:
    """An admit or reserve that found too few blocks and changed nothing.

    ``num_free_blocks`` are, for TENANT_LIMIT, those that the tenant is below its limit, and, for NEVER_FITS, the most
    that a lease of the tenant may have. ``reclaim_handles`` are to be preempted for it, in this order; when it is empty
    the choice is the scheduler's.
    """

    handle: int
    num_free_blocks: int
    num_blocks_needed: int
    reason: DenialReason = DenialReason.CAPACITY
    reclaim_handles: tuple[int, ...] = ()


class CopyDirection(Enum):
    """Which way a block's bytes go."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Bytes that a worker is to copy between a block of its device and a slot of its host memory."""

    direction: CopyDirection
    block_id: int
    host_slot: int


@dataclass(frozen=True, slots=True)
class KVMessage:
    """All that there is to say since the last message. Applied in the order of the fields."""

    sequence: int
    close_pools: tuple[str, ...] = ()
    open_pools: tuple[PoolSpec, ...] = ()
    commits: tuple[Commit, ...] = ()
    releases: tuple[int, ...] = ()
    reserves: tuple[Reserve, ...] = ()
    admits: tuple[Admit, ...] = ()


@dataclass(frozen=True, slots=True)
class KVReply:
    """The answer to the message of the same ``sequence``; each admit and reserve is granted or denied.

    ``block_copies`` are, by pool, for the next plan of its worker, whatever becomes of the requests. ``pool_owners``
    are the tenants that have a reservation, by pool, where quotas are new.
    """

    sequence: int
    pool_epochs: tuple[tuple[str, int], ...] = ()
    admitted: tuple[AdmitGranted, ...] = ()
    reserved: tuple[ReserveGranted, ...] = ()
    denied: tuple[Denied, ...] = ()
    block_copies: tuple[tuple[str, tuple[BlockCopy, ...]], ...] = ()
    pool_owners: tuple[tuple[str, tuple[str, ...]], ...] = ()
