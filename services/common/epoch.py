"""Epochs: numbers that name one life of a process and order its lives in time."""

import secrets

from services.common.clock import Clock

_RANDOM_BITS = 16


def new_epoch(clock: Clock) -> int:
    """Return ``unix_ms << 16 | random``: unique in practice, and larger for a later life.

    A peer that has seen a larger epoch of the same service refuses a smaller one, so that a process that was believed
    dead cannot write any more.
    """
    return (clock.unix_ms() << _RANDOM_BITS) | secrets.randbits(_RANDOM_BITS)
