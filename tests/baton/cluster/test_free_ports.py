from __future__ import annotations

import socket

import pytest

from baton.cluster.free_ports import claim
from baton.errors import ConfigError


def test_a_taken_port_names_the_setting_and_the_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .*--admin-port") as caught:
            claim(port, "admin_port")
    assert caught.value.field == "admin_port"


def test_a_free_port_is_returned_and_zero_becomes_one() -> None:
    port = claim(0, "port")
    assert port > 0
    assert claim(port, "port") == port


def test_a_port_with_a_closed_connection_is_free() -> None:
    with socket.socket() as server:
        # As gRPC's servers do; Linux asks for it on both sides.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        # The side that closes first, the server's, is left lingering on the port.
        accepted.close()
        client.close()
    assert claim(port, "port") == port
