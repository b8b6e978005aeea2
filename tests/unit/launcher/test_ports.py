"""Ports: a taken one is refused by the name of its setting."""

import socket

import pytest

from services.common.errors import EngineError
from services.launcher.ports import find_free_ports, require_free_port


def test_taken_port_is_refused_and_free_again_after_close() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(EngineError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--http-port") as raised:
            require_free_port("127.0.0.1", port, "http_port")
        assert raised.value.metadata["field"] == "http_port"
    require_free_port("127.0.0.1", port, "http_port")


def test_host_of_another_machine_is_refused() -> None:
    with pytest.raises(EngineError, match=r"cannot listen on 192\.0\.2\.1:8080"):
        require_free_port("192.0.2.1", 8080, "http_port")


def test_free_ports_differ() -> None:
    ports = find_free_ports(["a", "b", "c"])
    assert len(set(ports.values())) == 3
    for port in ports.values():
        require_free_port("127.0.0.1", port, "http_port")
