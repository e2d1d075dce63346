"""A pool on a Ray of several nodes: groups of nodes, one taking over from another, and a node that leaves."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from baton.tether import tethered
from tests.baton.pool.test_ray_pool import PATIENCE_S, ROOT, SERVING, running, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


# As baton.pool.environment has it for the pool.
ON_LOOPBACK = {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@dataclass
class Nodes:
    """address: of Ray. ids: of the nodes, by name."""

    address: str
    ids: dict[str, str]

    def of(self, pid: int) -> str:
        """Name of the node that runs a process."""
        raylet = psutil.Process(pid).parent()
        assert raylet is not None
        (node_id,) = [word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--node_id=")]
        return next(name for name, known in self.ids.items() if known == node_id)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    command = tethered([sys.executable, "-m", "tests.baton.pool.ray_nodes", str(folder)])
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        while not (folder / "nodes.json").exists():
            assert process.poll() is None, (folder / "log").read_text()
            asyncio.run(asyncio.sleep(0.1))
        found = json.loads((folder / "nodes.json").read_text())
        yield Nodes(found["address"], found["nodes"])
    finally:
        process.communicate(timeout=PATIENCE_S)


def write_settings(folder: Path, group: str, drain_s: float = 1.0) -> None:
    """As a mounted ConfigMap changes: a link is turned to another file."""
    new = folder / f"{group}-{drain_s}.toml"
    pool = f'[pool]\ndecode_resources = ["baton_decode_{group}=1"]\n'
    new.write_text(f'{pool}[decode]\nhost = "{{ip}}"\ndrain_s = {drain_s}\n')
    link = folder / "link"
    link.symlink_to(new)
    link.replace(folder / "baton.toml")


async def test_the_group_that_serves_is_changed_while_workers_serve_and_a_node_leaves(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CONFIG", str(tmp_path / "baton.toml"))
    write_settings(tmp_path, "a")
    flags = (f"--ray-address={nodes.address}", "--decode-cpus=0", "--keep-workers", "--follow-config")
    async with running(tmp_path / "pool", "", *flags, "--namespace=groups") as pool:
        first = await pool.until(serving("decode-0"))
        assert nodes.of(first["decode-0"].pid) == "a"
        # All nodes are at this one address; the settings say {ip}.
        assert addresses(tmp_path / "pool") == {"127.0.0.1:1"}

        # A file that cannot be used changes nothing; neither does one that says the same.
        (tmp_path / "broken.toml").write_text("[pool]\nno_such_setting = 1\n")
        (tmp_path / "broken.toml").replace(tmp_path / "baton.toml")
        await until_logged(tmp_path / "pool", "changed settings are ignored")
        assert (await pool.workers())["decode-0"].pid == first["decode-0"].pid

        (tmp_path / "pool" / "ready").unlink()
        write_settings(tmp_path, "b")
        # The worker serves while the pool begins anew in its own process.
        await until_logged(tmp_path / "pool", "a new pool takes over")
        os.kill(first["decode-0"].pid, 0)
        async with asyncio.timeout(PATIENCE_S):
            while not (tmp_path / "pool" / "ready").exists():
                await asyncio.sleep(0.05)
        assert json.loads((tmp_path / "pool" / "ready").read_text())["pid"] == pool.facts["pid"]
    async with running(tmp_path / "next", "", *flags, "--namespace=groups") as pool:
        moved = await pool.until(
            lambda now: now["decode-0"].state == SERVING and now["decode-0"].pid != first["decode-0"].pid
        )
        home = nodes.of(moved["decode-0"].pid)
        assert home in ("b", "b2")

        leaving = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "baton.pool.leave_node", "--timeout-s=20", f"--node-id={nodes.ids[home]}"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, **ON_LOOPBACK},
            check=False,
        )
        assert (leaving.returncode, leaving.stderr) == (0, "1 workers drain\n")
        after = await pool.until(
            lambda now: now["decode-0"].state == SERVING and now["decode-0"].pid != moved["decode-0"].pid
        )
        assert {home, nodes.of(after["decode-0"].pid)} == {"b", "b2"}


def addresses(folder: Path) -> set[str]:
    """Where the workers that a pool has started are reached."""
    events = [json.loads(line) for line in (folder / "log").read_text().splitlines() if line.startswith("{")]
    return {event["address"] for event in events if event["event"] == "worker started"}


async def until_logged(folder: Path, text: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while text not in (folder / "log").read_text():
            await asyncio.sleep(0.1)
