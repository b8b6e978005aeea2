"""What `treadle replay` runs: a recorded log again on a worker, or its arrivals again through another policy.

A program of its own (``python -m services.scheduler.replay``), since the launcher imports no service.
"""

__all__: list[str] = []
