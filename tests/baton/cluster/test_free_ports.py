from __future__ import annotations

import socket
from pathlib import Path

import pytest

from baton.cluster import free_ports
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


def test_a_chosen_port_is_none_that_an_outgoing_connection_may_take() -> None:
    for _ in range(50):
        with socket.socket() as outgoing:
            # What the kernel chooses by itself.
            outgoing.bind(("127.0.0.1", 0))
            assert claim(0, "port") < free_ports._ephemeral_start() <= outgoing.getsockname()[1]


def test_no_port_is_chosen_twice() -> None:
    chosen = [claim(0, "port") for _ in range(100)]
    assert len(set(chosen)) == 100


def test_where_all_ports_may_be_taken_by_connections_the_kernel_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(free_ports, "EPHEMERAL_PORTS", tmp_path / "range")
    assert claim(0, "port") > 0


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
