"""A start that is refused, the order of the end, and news that fail. Whole clusters: tests/integration."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import pytest

from baton.cluster import local_cluster
from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from baton.cluster.places import Places, Ports
from baton.cluster.role_settings import RoleSettings
from baton.errors import ConfigError, Unavailable
from baton.rpc import open_channel
from baton.v1.pool_service_pb2 import ListWorkersResponse, PoolWorker
from tests import bare_model

FREE = {"port": 0, "http_port": 0, "admin_port": 0, "control_port": 0, "dashboard_port": 0}


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(bare_model.TEXT)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return str(folder)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Whatever is started or made although it should not be."""
    found: list[str] = []

    def make(what: str) -> None:
        found.append(what)
        raise AssertionError(what)

    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(local_cluster, "Guard", lambda: make("guard"))
    monkeypatch.setattr(local_cluster, "EmbeddedRedis", lambda **_: make("redis"))
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: make("folder"))
    return found


async def test_settings_that_cannot_be_read_are_refused_before_anything_is_started(
    model: str, made: list[str], tmp_path: Path
) -> None:
    settings = tmp_path / "baton.toml"
    settings.write_text("[router\n")
    with pytest.raises(ConfigError, match="cannot be read as TOML") as caught:
        await LocalCluster.start(ClusterConfig(model=model, ray=False, **FREE), config_file=str(settings))
    assert caught.value.field == "config"
    assert made == []
    assert not (tmp_path / "cache").exists()


async def test_a_log_dir_that_cannot_be_made_is_refused_before_anything_is_started(
    model: str, made: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    config = ClusterConfig(model=model, ray=False, log_dir=str(tmp_path / "file" / "logs"), **FREE)
    with pytest.raises(ConfigError) as caught:
        await LocalCluster.start(config)
    assert caught.value.field == "log_dir"
    assert made == []


class Parts:
    """A supervisor and a fleet that only note what is asked of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.lists: list[Exception | ListWorkersResponse] = []
        self.names = ["router-0", "decode-0"]
        self.answering: dict[str, int] = {}

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.asked.append("supervisor ended")

    async def stop(self, stages, grace_s) -> None:
        self.asked.append("processes stopped")

    async def close(self) -> None:
        self.asked.append("fleet closed")

    async def list_workers(self) -> ListWorkersResponse:
        news = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        if isinstance(news, Exception):
            raise news
        return news


@pytest.fixture
async def parts() -> Parts:
    return Parts()


@pytest.fixture
async def cluster(parts: Parts, tmp_path: Path) -> LocalCluster:
    places = Places(
        ports=Ports(
            public={"router-0": 1}, http={"router-0": 4}, admin={"router-0": 2}, control=3, dashboard=0
        ),
        redis_url="",
        logs=tmp_path,
        ready_file=tmp_path / "pool.json",
        ray_dir=tmp_path,
        role_settings=RoleSettings({}),
    )
    return LocalCluster(
        ClusterConfig(ray=False), places, open_channel, supervisor=parts, fleet=parts, pool=None
    )


async def test_nobody_can_add_a_worker_once_the_supervisor_has_ended(
    cluster: LocalCluster, parts: Parts
) -> None:
    await asyncio.sleep(0)
    await cluster.stop()
    assert parts.asked == ["fleet closed", "supervisor ended", "processes stopped"]


async def test_news_that_fail_are_told_and_go_on(
    cluster: LocalCluster, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cluster, "_NEWS_S", 0.0)
    gone = ListWorkersResponse(workers=[])
    there = ListWorkersResponse(workers=[PoolWorker(name="decode-0")])
    parts.lists = [there, Unavailable("no certificate"), Unavailable("no certificate"), gone]
    told: asyncio.Queue[str] = asyncio.Queue()
    telling = asyncio.create_task(cluster.tell(told.put_nowait))
    async with asyncio.timeout(10):
        lines = [await told.get() for _ in range(2)]
    assert lines == ["no news of the workers: no certificate", "decode-0 has left"]
    telling.cancel()
    await cluster.stop()


async def test_a_warning_in_a_log_is_told(cluster: LocalCluster, parts: Parts, tmp_path: Path) -> None:
    parts.lists = [ListWorkersResponse(workers=[])]
    entry = {"event": "layers are not compiled", "reason": "no g++", "remedy": "install it"}
    (tmp_path / "decode-0.log").write_text(json.dumps(entry) + "\n")
    told: asyncio.Queue[str] = asyncio.Queue()
    telling = asyncio.create_task(cluster.tell(told.put_nowait))
    async with asyncio.timeout(10):
        line = await told.get()
    assert line == "warning: decode-0: layers are not compiled: no g++; install it"
    telling.cancel()
    await cluster.stop()
