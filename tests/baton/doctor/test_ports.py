from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from baton.doctor import ports


@pytest.fixture
def listener():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_free_port_is_free(listener) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    (check,) = ports.checks({"admin_port": 0, "port": free})
    assert (check.name, check.state, check.found) == (f"port {free}", "ok", "free (port)")


@pytest.mark.skipif(not pathlib.Path("/proc/net/tcp").exists(), reason="needs /proc")
def test_whoever_listens_is_named(listener, monkeypatch) -> None:
    assert ports.find_listener(listener)[0] == os.getpid()
    monkeypatch.setattr(ports, "_command_line", lambda _folder: "nginx: master process")
    (check,) = ports.checks({"http_port": listener})
    assert check.state == "warning"
    assert f"process {os.getpid()}: nginx: master process" in check.found
    assert "--http-port" in check.remedy


@pytest.mark.skipif(not pathlib.Path("/proc/net/tcp").exists(), reason="needs /proc")
def test_only_the_first_words_of_a_command_line_are_shown() -> None:
    code = (
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); "
        "print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "--password", "hunter2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        found = ports.find_listener(int(child.stdout.readline()))
        child.stdin.close()
    assert found[0] == child.pid
    assert "hunter2" not in found[1]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["redis-server", "--requirepass", "hunter2"], "redis-server"),
        (["/usr/bin/python3.11", "-u", "-X", "dev", "-m", "router", "--key", "hunter2"],
         "/usr/bin/python3.11 -m router"),
        (["python", "/venv/bin/baton", "up", "--redis-url", "redis://:hunter2@h"], "python /venv/bin/baton"),
        (["python", "-c", "hunter2"], "python"),
        (["python", "-chunter2"], "python"),
        (["python"], "python"),
        # A process that named itself.
        (["ray-dashboard --password=hunter2"], "ray-dashboard"),
    ],
)  # fmt: skip
def test_no_more_of_a_command_line_than_its_program_is_shown(words, shown) -> None:
    assert ports.shown_words("\0".join([*words, ""]).encode()) == shown


@pytest.mark.parametrize(
    ("command_line", "state"),
    [
        ("/usr/bin/python -m router", "ok"),
        ("/venv/bin/python /venv/bin/baton up", "ok"),
        ("ray::DashboardHead", "ok"),
        ("/usr/sbin/nginx -g daemon", "warning"),
        ("/opt/batonette serve", "warning"),
    ],
)
def test_our_own_are_no_strangers(listener, monkeypatch, command_line, state) -> None:
    monkeypatch.setattr(ports, "find_listener", lambda _port: (7, command_line))
    (check,) = ports.checks({"port": listener})
    assert check.state == state


def test_a_listener_that_cannot_be_seen_is_said(listener, monkeypatch) -> None:
    monkeypatch.setattr(ports, "find_listener", lambda _port: None)
    (check,) = ports.checks({"port": listener})
    assert (check.state, "a process of another user" in check.found) == ("warning", True)
