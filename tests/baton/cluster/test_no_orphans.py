"""However the process that started the children ends, nothing is left of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

# Two children; one of them has a child of its own in the same group, as Ray's agents are.
# It prints all process ids, then "ready" once the stubborn one really ignores SIGTERM.
SCRIPT = """
import asyncio, os, random, sys
from pathlib import Path
from baton.cli.interrupts import Interrupts
from baton.cli.up import exit_now
from baton.cluster.guard import Guard
from baton.cluster.role_process import RoleProcess, RoleSpec
from baton.cluster.supervisor import Supervisor

logs, grace_s, ignore = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
child = (
    "import os, signal\\n"
    f"signal.signal(signal.SIGTERM, signal.{ignore})\\n"
    "pid = os.fork()\\n"
    "if pid: print(pid, flush=True)\\n"
    "while True: signal.pause()\\n"
)

async def work():
    async with Guard() as guard:
        (logs / "folder").mkdir()
        guard.own(logs / "folder")
        specs = [RoleSpec(name=n, role=n, command=("-I", "-S", "-c", child)) for n in ("router-0", "pool")]
        processes = [RoleProcess(spec, logs / spec.name, guard) for spec in specs]
        supervisor = Supervisor(processes, report=print, rng=random.Random(0))
        running = asyncio.create_task(supervisor.run())
        try:
            while not all(p.log_file.is_file() and p.log_file.read_text().endswith("\\n") for p in processes):
                await asyncio.sleep(0.01)
            grandchildren = [int(p.log_file.read_text()) for p in processes]
            print(*supervisor.pids.values(), *grandchildren, guard._process.pid, flush=True)
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])
            await supervisor.stop([supervisor.names], grace_s)

first = lambda: print("stopping", flush=True)
asyncio.run(Interrupts(on_first=first, on_second=exit_now).run(work()))
"""


class Parent:
    def __init__(self, tmp_path: Path, *, grace_s: float, handler: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path), str(grace_s), handler],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.children = [psutil.Process(int(pid)) for pid in self.line().split()]
        assert len(self.children) == 5

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> tuple[int, list[psutil.Process]]:
        """Exit status, and the children that are still there after a moment."""
        status = self.process.wait(timeout=10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        _, alive = psutil.wait_procs(self.children, timeout=5)
        return status, [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_stops_everything(tmp_path: Path, number: signal.Signals) -> None:
    parent = Parent(tmp_path, grace_s=10.0, handler="SIG_DFL")
    parent.process.send_signal(number)
    assert parent.end() == (0, [])


def test_a_second_interrupt_does_not_wait_for_stubborn_children(tmp_path: Path) -> None:
    parent = Parent(tmp_path, grace_s=600.0, handler="SIG_IGN")
    parent.process.send_signal(signal.SIGINT)
    assert parent.line() == "stopping\n"
    parent.process.send_signal(signal.SIGINT)
    assert parent.end() == (130, [])


def test_a_killed_parent_takes_everything_along(tmp_path: Path) -> None:
    parent = Parent(tmp_path, grace_s=10.0, handler="SIG_IGN")
    assert (tmp_path / "folder").is_dir()
    parent.process.kill()
    assert parent.end() == (-signal.SIGKILL, [])
    assert not (tmp_path / "folder").exists()
