"""Which worker has probably computed the beginning of a prompt already: a hint for placement, never for correctness.

Blocks are shared within one worker's pool only, so two requests with one beginning gain from meeting on one worker.
The scheduler remembers what it admitted where, as chained hashes of pieces of the prompt, in a bounded map per worker
whose least recently used entries are dropped first, much as the pool evicts. The hashes are Python's: a collision
costs a miss at worst, since the KV-cache manager verifies every hit.
"""

from collections import OrderedDict
from collections.abc import Sequence

PIECE_TOKENS = 64
MAX_PIECES_PER_WORKER = 1 << 16


def hash_pieces(cache_scope: str, token_ids: Sequence[int]) -> list[int]:
    """Hash every whole piece of ``token_ids`` with all that precedes it. Pure within one process."""
    hashes = []
    chain = hash(cache_scope)
    for start in range(0, len(token_ids) - PIECE_TOKENS + 1, PIECE_TOKENS):
        chain = hash((chain, tuple(token_ids[start : start + PIECE_TOKENS])))
        hashes.append(chain)
    return hashes


class PrefixMap:
    """What one worker was given to compute.

    Args:
        max_pieces: Bound; the pool cannot hold more than its slots anyway.
    """

    def __init__(self, max_pieces: int) -> None:
        self._max_pieces = min(max_pieces, MAX_PIECES_PER_WORKER)
        self._pieces: OrderedDict[int, None] = OrderedDict()

    def count_hits(self, hashes: Sequence[int]) -> int:
        """Return how many pieces from the beginning on are known."""
        for index, piece in enumerate(hashes):
            if piece not in self._pieces:
                return index
        return len(hashes)

    def learn(self, hashes: Sequence[int]) -> None:
        """Remember pieces as used now."""
        for piece in hashes:
            self._pieces[piece] = None
            self._pieces.move_to_end(piece)
        while len(self._pieces) > self._max_pieces:
            self._pieces.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, as the pool has."""
        self._pieces.clear()
