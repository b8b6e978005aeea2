"""Keys of the prefix index: a hash chain over blocks of tokens that starts from the cache domain.

::

    root      = H("treadle.prefix.v1" | len model | model | len weight_version | weight_version | ...)
    block 0   = H(root    | 16 token ids as little-endian uint32)
    block 1   = H(block 0 | 16 token ids ...)

H is SHA-256: a tenant who could find collisions could read another's cache. Each field of the domain is tagged and
has its length before it, so no two domains have the same preimage. The hash only *finds* candidates; a hit is
verified against the stored tokens and their whole chain, so the index stays right under any hash at all (a test
truncates it to 8 bits).
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

PrefixHash = Callable[[bytes], bytes]
"""Maps a preimage to a digest; deterministic. Need not be free of collisions for the index to be right."""

_VERSION_TAG = b"treadle.prefix.v1"


@dataclass(frozen=True, slots=True)
class CacheDomain:
    """Within what contents may be shared; two requests of different domains never share a block."""

    model: str
    weight_version: str
    adapter: str
    cache_scope: str


def sha256(preimage: bytes) -> bytes:
    """Digest with SHA-256 (32 bytes)."""
    return hashlib.sha256(preimage).digest()


def domain_preimage(domain: CacheDomain) -> bytes:
    """Encode ``domain`` injectively: for each field its name, then the length of its value, then the value."""
    parts = [_VERSION_TAG]
    for field in fields(domain):
        value = str(getattr(domain, field.name)).encode("utf-8", "surrogatepass")
        parts += [field.name.encode(), struct.pack("<Q", len(value)), value]
    return b"".join(parts)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as little-endian uint32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)
