"""The values that cross the border of the KV-cache core: what a scheduler may ask, and what it is answered.

A handle is a uint64 that names one admission of one request to one worker; it is the id of the lease here. Token ids
are uint32. All values are immutable; the wire adapter builds them from protobuf and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from services.kv_cache.core.ledger import DenialReason


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A block pool to open; one per worker, named as the worker.

    ``num_blocks`` counts the null block, so ``num_blocks - 1`` are usable; ``block_size`` is in token slots. ``model``
    and ``weight_version`` scope the prefix index. ``worker_epoch`` is the life of the worker whose memory it is: a pool
    that is opened again for the same life keeps what is cached; 0 is unknown, and keeps nothing. ``num_host_blocks``
    are the blocks that the worker's host memory holds besides; 0 is no host tier.
    """

    pool: str
    num_blocks: int
    block_size: int
    model: str
    weight_version: str
    worker_epoch: int = 0
    num_host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Admit:
    """Ask for a lease with slots for ``num_tokens`` positions, of which ``token_ids`` are known (>= 1).

    Its blocks count against the quota of ``tenant``; ``request_id`` is for people. ``max_num_tokens`` are the positions
    that the request may grow to, 0 being unknown. ``is_reserved_only`` is set when another ask, which goes before this
    one, was denied in an earlier message: then only what is owed to the tenant is granted.
    """

    handle: int
    pool: str
    cache_scope: str
    token_ids: Sequence[int]
    num_tokens: int
    request_id: str = ""
    tenant: str = ""
    max_num_tokens: int = 0
    is_reserved_only: bool = False


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask for ``num_blocks`` more blocks at the end of a lease's block table."""

    handle: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Tell that KV is present for positions below ``num_computed_tokens``.

    ``token_ids`` are those that the lease's request gained since the last commit (or since its admission).
    """

    handle: int
    num_computed_tokens: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class AdmitGranted:
    """A lease: its whole block table, and how many leading positions already hold KV (a multiple of the block size)."""

    handle: int
    block_epoch: int
    block_ids: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ReserveGranted:
    """Blocks appended to a lease's block table, in order."""

    handle: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Denied:
    """An ``Admit`` or ``Reserve`` that took nothing, since fewer blocks can be handed out than it needs.

    ``num_free_blocks`` are, for TENANT_LIMIT, those that the tenant is below its limit, and, for NEVER_FITS, the most
    that a lease of the tenant may have. ``reclaim_handles`` are leases to preempt for it, in this order; when it is
    empty the manager has no opinion.
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
    """Everything a scheduler has to say since its last message.

    Applied in this order: closes, opens, commits, releases, reserves, admits. So content is known before its blocks are
    given up, what is given up can be handed out at once, and running requests are served before new ones.
    """

    sequence: int
    open_pools: tuple[PoolSpec, ...] = ()
    close_pools: tuple[str, ...] = ()
    commits: tuple[Commit, ...] = ()
    releases: tuple[int, ...] = ()
    reserves: tuple[Reserve, ...] = ()
    admits: tuple[Admit, ...] = ()


@dataclass(frozen=True, slots=True)
class KVReply:
    """The answer to the message of the same ``sequence``: each reserve and admit is granted or denied, none is left.

    ``block_copies`` are, by pool, what its worker must copy before any row that is planned from now on, in this order,
    whatever becomes of the requests that they were decided for. ``pool_owners`` names, for pools whose quotas are news
    to the scheduler, the tenants that have a reservation there.
    """

    sequence: int
    pool_epochs: tuple[tuple[str, int], ...] = ()
    admitted: tuple[AdmitGranted, ...] = ()
    reserved: tuple[ReserveGranted, ...] = ()
    denied: tuple[Denied, ...] = ()
    block_copies: tuple[tuple[str, tuple[BlockCopy, ...]], ...] = ()
    pool_owners: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Figures of one pool. ``num_free + num_cached + num_held + 1 == num_blocks``, the one being the null block.

    ``num_cached`` blocks hold reusable content and no lease; they can be handed out as the free ones can.
    ``hit_tokens`` of ``query_tokens`` known tokens of granted admissions needed no computation. ``num_host_cached`` of
    the ``num_host_blocks`` of the host tier hold content; ``num_restored`` blocks were brought back from it so far.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_leases: int
    hit_tokens: int
    query_tokens: int
    num_host_blocks: int = 0
    num_host_cached: int = 0
    num_restored: int = 0
