"""Who gives way when a worker's pool has no block left for a running request.

The victim is the request that arrived last among those running there, which may be the one that asked. By recompute:
its blocks are released, its known tokens stay, and it waits again at the place that its arrival gives it. Two
consequences:

- *Progress.* The request that arrived first is a victim only when it runs alone, and alone it fits (checked when it was
  admitted). So the oldest request always runs to its end, then the next oldest is the oldest.
- *No ping-pong.* The lane admits nobody until one of its requests has ended. Otherwise the victim, whose blocks were
just
  freed, would be admitted again at once, only to be preempted at the next block that an older request needs.
"""

from collections.abc import Iterable

from services.scheduler.core.request import Request


def choose_victim(running: Iterable[Request]) -> Request:
    """Choose whom to preempt among ``running``, which is not empty."""
    return max(running, key=lambda request: request.arrival)
