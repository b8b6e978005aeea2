"""The plan log: every plan, result and arrival of a scheduler on disk, to be verified, run again, or re-planned.

Owns: the log's files and their format (``treadle/scheduler/v1/plan_log.proto``). Guarantees: recording never makes a
step wait; a record that was changed, cut or lost is named when the log is read; the disk it takes is bounded.
"""

__all__: list[str] = []
