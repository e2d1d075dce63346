from __future__ import annotations

import os
import resource
from types import SimpleNamespace

import pytest

from baton.doctor import machine

ENOUGH = (65536, 65536)
ENDLESS = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def states(**limits: tuple[int, int]) -> dict[str, str]:
    chosen = {getattr(resource, f"RLIMIT_{name}"): value for name, value in limits.items()}
    return {check.name: check.state for check in machine.other_limits(lambda kind: chosen.get(kind, ENDLESS))}


@pytest.mark.parametrize(
    ("limit", "state", "remedy"),
    [
        (ENOUGH, "ok", ""),
        (ENDLESS, "ok", ""),
        ((4096, 4096), "ok", ""),
        ((1024, 524288), "warning", "ulimit -n 4096"),
        ((1024, 2048), "warning", "the hard limit is 2048"),
    ],
)
def test_open_files(limit, state, remedy) -> None:
    check = machine.open_files(limit)
    assert check.state == state
    assert check.remedy.startswith(remedy)


@pytest.mark.parametrize(("available", "state"), [(8 << 30, "ok"), ((1 << 30) - 1, "warning"), (None, "ok")])
def test_memory(available, state) -> None:
    assert machine.memory(available).state == state


@pytest.mark.parametrize(
    ("blocks", "state"),
    # A decode worker's arena is 48 MiB; containers have 64 MiB, and that is enough for one.
    [(16384, "ok"), (16383, "warning")],
)
def test_shared_memory(monkeypatch, tmp_path, blocks, state) -> None:
    found = SimpleNamespace(f_frsize=4096, f_blocks=20000, f_bavail=blocks)
    monkeypatch.setattr(os, "statvfs", lambda _path: found)
    check = machine.shared_memory(tmp_path)
    assert check.state == state
    assert check.found == f"{blocks * 4096 >> 20} MiB free of 78 MiB"


def test_no_shared_memory_at_all(tmp_path) -> None:
    assert machine.shared_memory(tmp_path / "nothing").state == "warning"


def test_other_limits_are_only_told_where_they_are_low() -> None:
    assert states() == {"processes": "ok"}
    low = states(NPROC=(512, 512), AS=(1 << 32, 1 << 32))
    assert (low["processes"], low["address space"]) == ("warning", "warning")


def test_everything_is_looked_at() -> None:
    names = [check.name for check in machine.checks()]
    assert names[:5] == ["cores", "memory", "/dev/shm", "open files", "processes"]
