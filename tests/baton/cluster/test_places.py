"""Where a cluster keeps what it writes, and where it listens."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cluster.config import ClusterConfig
from baton.cluster.places import Places, Ports, make_logs
from baton.cluster.role_settings import RoleSettings
from baton.errors import ConfigError

ANY = {"port": 0, "http_port": 0, "admin_port": 0, "control_port": 0, "dashboard_port": 0}
PORTS = Ports(
    public={"router-0": 1, "router-1": 11},
    http={"router-0": 5, "router-1": 15},
    admin={"router-0": 2, "router-1": 12},
    control=3,
    dashboard=4,
)


def made(config: ClusterConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Places:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    places = Places.make(
        PORTS, "redis://127.0.0.1:1", logs=make_logs(config), config_file="", role_settings=RoleSettings()
    )
    shutil.rmtree(places.ray_dir)
    return places


@pytest.mark.parametrize("given", [True, False], ids=["log-dir", "run-folder"])
def test_the_folder_of_the_logs_is_its_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    config = ClusterConfig(log_dir=str(tmp_path / "logs") if given else "")
    places = made(config, monkeypatch, tmp_path)
    assert places.logs.is_relative_to(tmp_path)
    assert stat.S_IMODE(places.logs.stat().st_mode) == 0o700


def test_folders_of_ended_runs_go_and_those_of_running_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    runs = tmp_path / "run"
    # The oldest of all is that of a process that lives.
    running = runs / f"20200101-000000-{os.getpid()}"
    ended = [runs / f"20210101-0000{index:02d}-{child.pid}" for index in range(20)]
    for folder in (running, *ended):
        folder.mkdir(parents=True)
    new = make_logs(ClusterConfig())
    assert new.is_dir()
    assert running.is_dir()
    assert [folder for folder in ended if folder.is_dir()] == ended[-9:]


def test_logs_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made: Not a directory") as caught:
        make_logs(ClusterConfig(log_dir=str(tmp_path / "file" / "logs")))
    assert caught.value.field == "log_dir"


def test_each_router_has_two_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = made(ClusterConfig(), monkeypatch, tmp_path)
    assert places.addresses == {"router-0": "127.0.0.1:1", "router-1": "127.0.0.1:11"}
    assert places.admin_addresses == {"router-0": "127.0.0.1:2", "router-1": "127.0.0.1:12"}


def test_shared_memory_is_looked_for_where_the_workers_are_told_to_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_DECODE_SHM_FOLDER", "/elsewhere")
    assert made(ClusterConfig(), monkeypatch, tmp_path).shm_folders == {Path("/dev/shm"), Path("/elsewhere")}


def test_free_ports_are_picked_for_every_router() -> None:
    ports = Ports.claim(ClusterConfig(routers=2, **ANY))
    per_router = (ports.public, ports.http, ports.admin)
    assert [list(claimed) for claimed in per_router] == 3 * [["router-0", "router-1"]]
    claimed = [port for ports_of in per_router for port in ports_of.values()]
    assert min(*claimed, ports.control, ports.dashboard) > 0


def test_the_second_routers_port_may_not_be_taken_either() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        second = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {second} ") as caught:
            Ports.claim(ClusterConfig(routers=2, **{**ANY, "port": second - 10}))
    assert caught.value.field == "port"
