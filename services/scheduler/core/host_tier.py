"""Whether a worker's host memory is worth using: the choice between restoring a block and computing it again.

Both cost in proportion to the tokens, so the choice is the same for every block of a worker and is made once, when its
pool is opened: restoring a block must take less than computing its tokens as part of a long prompt, the cheapest way
there is to compute them. What a copy to the host costs is left out: it is made beside other work and saves a
computation only if the content is wanted again, but it is as fast as the way back.
"""

from dataclasses import dataclass
from typing import Literal

HostTierUse = Literal["auto", "always", "never"]
"""`auto`: where restoring was measured to be faster."""


@dataclass(frozen=True, slots=True)
class HostTierFacts:
    """What a worker tells of its host memory; times in microseconds, 0 where they were not measured."""

    num_host_blocks: int
    block_restore_us: float
    token_prefill_us: float


def num_useful_host_blocks(facts: HostTierFacts, block_size: int, use: HostTierUse) -> int:
    """Return how many blocks of the host memory to use: all, or none. Pure."""
    is_faster = 0 < facts.block_restore_us < block_size * facts.token_prefill_us
    is_useful = use == "always" or (use == "auto" and is_faster)
    return facts.num_host_blocks if is_useful else 0
