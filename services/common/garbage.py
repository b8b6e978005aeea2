"""The garbage collector of a serving process, set once it serves.

Guarantees: a full collection never looks again at what the process was built from (modules, classes, tables: some
hundred thousand objects that live as long as it does), and young collections are rare, since a step's garbage is
freed by reference counts. Cycles are still collected, later.
"""

import gc
from typing import Final

_YOUNG_THRESHOLD: Final = 20_000
"""Container objects made and not yet freed that start a young collection; some hundred requests hold fewer."""

_OLD_THRESHOLDS: Final = (20, 20)


def settle_garbage_collector() -> None:
    """Collect what starting left behind, and take all that lives now out of later collections.

    Gives memory of cycles among today's objects up; call it once, when start-up is over.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_THRESHOLD, *_OLD_THRESHOLDS)
