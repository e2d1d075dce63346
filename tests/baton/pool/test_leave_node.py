"""Which processes leave with a node of Ray. That they do is seen in test_ray_nodes.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.pool import leave_node


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /proc."""
    monkeypatch.setattr(leave_node, "PROC", tmp_path)
    (tmp_path / "self").mkdir()
    return tmp_path


def run(proc: Path, pid: int, *words: str, parent: int = 1) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"\0".join(word.encode() for word in words))
    (folder / "stat").write_text(f"{pid} (a name) with (parts) S {parent} 0 0\n")


def raylet(proc: Path, pid: int, node: str) -> None:
    run(proc, pid, "/opt/ray/raylet", f"--node_id={node}", "--gcs-address=10.0.0.1:6379")


def test_the_only_node_is_meant_and_its_own_workers_leave(proc: Path) -> None:
    raylet(proc, 10, "aa")
    run(proc, 11, "ray::DecodeWorker", parent=10)
    run(proc, 12, "ray::PrefillWorker.look", parent=10)
    # Of others: another node's, somebody else's actor, what only sounds like one, and one that has ended.
    run(proc, 21, "ray::DecodeWorker", parent=20)
    run(proc, 13, "ray::Trainer", parent=10)
    run(proc, 14, "grep", "ray::DecodeWorker", parent=10)
    run(proc, 15, "", parent=10)
    found = leave_node.find_raylet("")
    assert found == leave_node.Raylet(pid=10, node_id="aa", gcs_address="10.0.0.1:6379")
    assert sorted(leave_node.workers_of(found)) == [11, 12]


def test_of_several_nodes_one_has_to_be_named(proc: Path) -> None:
    raylet(proc, 10, "aa")
    raylet(proc, 20, "bb")
    assert leave_node.find_raylet("bb").pid == 20
    for wrong in ("", "cc"):
        with pytest.raises(ConfigError, match=r"are (aa, bb|bb, aa); name one") as caught:
            leave_node.find_raylet(wrong)
        assert caught.value.field == "node_id"


def test_where_no_node_runs_there_is_nothing_to_leave(proc: Path) -> None:
    run(proc, 10, "/usr/bin/raylet-tool", "--node_id=aa")
    with pytest.raises(ConfigError, match="run this where one does"):
        leave_node.find_raylet("")
