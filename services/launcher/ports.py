"""TCP ports: refusing early when one is taken, and finding free ones."""

import socket
from collections.abc import Sequence
from contextlib import ExitStack

from services.common.errors import EngineError, ErrorReason
from services.launcher.topology import join_host_port


def require_free_port(host: str, port: int, flag: str) -> None:
    """Check that a server could listen on ``host:port`` now.

    Args:
        host: Name or address to listen on.
        port: TCP port.
        flag: Name of the setting, for the error.

    Raises:
        EngineError: INVALID_CONFIG when it is taken, may not be used, or the host is not one of this machine.
    """
    try:
        choices = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = choices[0]
        with socket.socket(family, kind, protocol) as probe:
            # A restart within a minute meets connections in TIME_WAIT, which do not keep a server from listening.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise EngineError(
            ErrorReason.INVALID_CONFIG,
            f"cannot listen on {join_host_port(host, port)}: {error.strerror or error}. Stop what uses it, or choose "
            f"another --{flag.replace('_', '-')}. (What a killed launcher left is gone after a few seconds.)",
            field=flag,
        ) from error


def find_free_ports(names: Sequence[str]) -> dict[str, int]:
    """Return a free loopback TCP port for each name. Another program may take one before it is used."""
    with ExitStack() as stack:
        ports = {}
        for name in names:
            probe = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.bind(("127.0.0.1", 0))
            ports[name] = probe.getsockname()[1]
        return ports
