"""How much memory this host, or the container around it, can still give out."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USAGE = Path("/sys/fs/cgroup/memory.current")
_KIB = 1024


def available_bytes() -> int:
    """Return what can be allocated without swapping: the host's figure, or what the control group leaves, if less.

    Returns:
        Bytes; a very large number where the system tells nothing.
    """
    return min(_host_available_bytes(), _cgroup_available_bytes())


def _host_available_bytes() -> int:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return 1 << 62
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * _KIB
    return 1 << 62


def _cgroup_available_bytes() -> int:
    try:
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
        usage = int(_CGROUP_USAGE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - usage)
