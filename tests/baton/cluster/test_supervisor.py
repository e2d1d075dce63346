"""Real child processes, but trivial ones."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from baton.cluster import restart_policy, supervisor
from baton.cluster.guard import Guard
from baton.cluster.role_process import RoleProcess, RoleSpec, describe_end
from baton.cluster.supervisor import Supervisor
from baton.errors import BatonError, ConfigError, ModelError, Unavailable

# Started without site packages, a child is there after some 20 ms.
FOREVER = "import signal; signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\n"
    "while True: signal.pause()"
)
LEAVING = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True)\n"
    "while True: signal.pause()"
)
FAILING = "import sys; print('about to fail', flush=True); sys.exit('the weights are missing')"


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(restart_policy, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(restart_policy, "LEAST_LIFE_S", 0.0)


def child(name: str, script: str, tmp_path: Path, guard: Guard, *, role: str = "prefill") -> RoleProcess:
    spec = RoleSpec(name=name, role=role, command=("-I", "-S", "-c", script))
    return RoleProcess(spec, tmp_path / f"{name}.log", guard)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@asynccontextmanager
async def running(
    *processes: RoleProcess, reports: list[str]
) -> AsyncIterator[tuple[Supervisor, asyncio.Task]]:
    supervising = Supervisor(processes, report=reports.append, rng=random.Random(0))
    task = asyncio.create_task(supervising.run())
    try:
        await until(lambda: len(supervising.pids) == len(processes) or task.done())
        yield supervising, task
    finally:
        task.cancel()
        await asyncio.wait([task])
        await supervising.stop([supervising.names], grace_s=5.0)


async def test_a_killed_child_comes_back_and_is_reported(tmp_path: Path) -> None:
    reports: list[str] = []
    async with (
        Guard() as guard,
        running(child("prefill-0", FOREVER, tmp_path, guard), reports=reports) as (
            supervising,
            _,
        ),
    ):
        supervising.is_settled = True
        first = supervising.pids["prefill-0"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervising.pids.get("prefill-0", first) != first)
    assert reports == ["prefill-0 was killed by SIGKILL; starting it again"]


async def test_a_failure_during_the_start_ends_it_with_the_end_of_the_log(tmp_path: Path) -> None:
    async with Guard() as guard:
        failing = child("prefill-0", FAILING, tmp_path, guard)
        waiting = child("router-0", FOREVER, tmp_path, guard, role="router")
        async with running(waiting, failing, reports=[]) as (_, task):
            with pytest.raises(Unavailable, match="prefill-0 ended with status 1") as caught:
                await task
            assert "about to fail" in caught.value.message
            assert "the weights are missing" in caught.value.message


@pytest.mark.parametrize(("status", "kind"), [(2, ConfigError), (5, ModelError)])
async def test_a_role_that_cannot_use_its_setting_or_model_says_so_with_its_last_words(
    tmp_path: Path, status: int, kind: type[BatonError]
) -> None:
    script = f"print('the head is missing', flush=True); raise SystemExit({status})"
    async with Guard() as guard:
        refusing = child("prefill-0", script, tmp_path, guard)
        async with running(refusing, reports=[]) as (_, task):
            with pytest.raises(kind, match=r"prefill-0 ended with(.|\n)*the head is missing"):
                await task


async def test_the_last_of_a_role_is_given_up_after_five_quick_failures(tmp_path: Path) -> None:
    reports: list[str] = []
    async with Guard() as guard:
        failing = child("prefill-0", FAILING, tmp_path, guard)
        supervising = Supervisor([failing], report=reports.append, rng=random.Random(0))
        supervising.is_settled = True
        with pytest.raises(Unavailable, match=r"5 times in a row.*no other prefill") as caught:
            await supervising.run()
    assert reports == ["prefill-0 ended with status 1; starting it again"] * 4
    assert failing.log_file.read_text().count("about to fail") == 5
    assert "the weights are missing" in caught.value.message


async def test_one_of_two_may_be_given_up(tmp_path: Path) -> None:
    reports: list[str] = []
    async with Guard() as guard:
        healthy = child("prefill-0", FOREVER, tmp_path, guard)
        failing = child("prefill-1", FAILING, tmp_path, guard)
        supervising = Supervisor([healthy, failing], report=reports.append, rng=random.Random(0))
        supervising.is_settled = True
        task = asyncio.create_task(supervising.run())
        await until(lambda: any("given up" in line for line in reports))
        assert list(supervising.pids) == ["prefill-0"]
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])
        await supervising.stop([supervising.names], grace_s=5.0)


async def test_stages_stop_one_after_the_other(tmp_path: Path) -> None:
    order = tmp_path / "order"
    script = (
        "import signal, sys\n"
        "def end(*_):\n"
        f"    open({str(order)!r}, 'a').write(sys.argv[1] + '\\n'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True)\n"
        "while True: signal.pause()\n"
    )
    names = ["router-0", "prefill-0", "pool"]
    async with Guard() as guard:
        processes = [
            RoleProcess(
                RoleSpec(name=name, role=name, command=("-I", "-S", "-c", script, name)),
                tmp_path / f"{name}.log",
                guard,
            )
            for name in names
        ]
        async with running(*processes, reports=[]) as (supervising, task):
            await until(lambda: all("up" in process.log_file.read_text() for process in processes))
            task.cancel()
            await asyncio.wait([task])
            await supervising.stop([["router-0"], ["prefill-0", "pool"]], grace_s=5.0)
    assert order.read_text().split()[0] == "router-0"
    assert sorted(order.read_text().split()) == sorted(names)


async def test_a_child_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    async with Guard() as guard:
        stubborn = child("prefill-0", STUBBORN, tmp_path, guard)
        await stubborn.start()
        pid = stubborn.pid
        await until(lambda: "up" in stubborn.log_file.read_text())
        await stubborn.stop(grace_s=0.1)
        assert is_gone(pid)
        assert not stubborn.is_running


async def test_a_role_may_have_more_grace_than_the_others(tmp_path: Path) -> None:
    script = (
        "import signal, sys\n"
        "def end(*_): print('in order', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True)\n"
        "while True: signal.pause()\n"
    )
    async with Guard() as guard:
        slow = RoleProcess(
            RoleSpec(name="pool", role="pool", command=("-I", "-S", "-c", script), extra_grace_s=20.0),
            tmp_path / "pool.log",
            guard,
        )
        await slow.start()
        await until(lambda: "up" in slow.log_file.read_text())
        await slow.stop(grace_s=0.0)
        assert slow.log_file.read_text().endswith("in order\n")


async def test_another_spec_holds_from_the_next_start(tmp_path: Path) -> None:
    async with Guard() as guard:
        process = child("pool", "print('first')", tmp_path, guard)
        await process.start()
        await process.wait()
        process.spec = replace(process.spec, command=("-I", "-S", "-c", "print('second')"))
        await process.start()
        await process.wait()
        assert process.log_file.read_text().split() == ["first", "second"]


async def test_a_child_that_cannot_be_added_leaves_no_trace(tmp_path: Path) -> None:
    async with Guard() as guard:
        first = child("decode-0", FOREVER, tmp_path, guard, role="decode")
        async with running(first, reports=[]) as (supervising, _):
            with pytest.raises(FileNotFoundError):
                await supervising.add(child("decode-1", FOREVER, tmp_path / "no" / "folder", guard))
            assert supervising.names == ["decode-0"]


async def test_what_a_dead_child_left_behind_is_killed(tmp_path: Path) -> None:
    script = "import os, signal\npid = os.fork()\nif pid: print(pid, flush=True)\nsignal.pause()\n"
    async with Guard() as guard:
        parent = child("pool", script, tmp_path, guard, role="decode")
        await parent.start()
        await until(lambda: parent.log_file.read_text().strip())
        grandchild = int(parent.log_file.read_text())
        os.kill(parent.pid, signal.SIGKILL)
        assert (await parent.wait())[0] == -signal.SIGKILL
        await until(lambda: is_gone(grandchild))
        with pytest.raises(Unavailable, match="pool is not running"):
            _ = parent.pid


async def test_structured_log_lines_are_reduced_to_what_happened(tmp_path: Path) -> None:
    script = 'print(\'{"event": "cannot run", "reason": "no such model", "role": "prefill-0", "x": 1}\')'
    async with Guard() as guard:
        process = child("prefill-0", script, tmp_path, guard)
        assert process.last_lines() == "  (nothing was logged)"
        await process.start()
        await process.wait()
    assert process.last_lines() == "  prefill-0 cannot run: no such model"


def test_ends_are_described_in_words() -> None:
    assert describe_end(3) == "ended with status 3"
    assert describe_end(-9) == "was killed by SIGKILL"


def test_five_is_the_number_in_the_message() -> None:
    assert supervisor.MAX_QUICK_DEATHS == 5


async def test_a_child_that_was_asked_to_leave_comes_back_and_counts_no_death(tmp_path: Path) -> None:
    reports: list[str] = []
    async with Guard() as guard:
        leaving = child("prefill-0", LEAVING, tmp_path, guard)
        async with running(leaving, reports=reports) as (supervising, task):
            supervising.is_settled = True
            # More often than a role may die in a row.
            for times in range(1, restart_policy.MAX_QUICK_DEATHS + 2):
                await until(lambda times=times: leaving.log_file.read_text().count("up") == times)
                os.kill(leaving.pid, signal.SIGTERM)
                await until(lambda times=times: len(reports) == times)
            await until(lambda: leaving.is_running)
            assert set(reports) == {"prefill-0 ended with status 0; starting it again"}
            assert supervising.life("prefill-0").num_restarts == restart_policy.MAX_QUICK_DEATHS + 1
            assert not task.done()


async def test_an_added_child_is_kept_like_the_others(tmp_path: Path) -> None:
    reports: list[str] = []
    async with Guard() as guard:
        first, second = (
            child(f"decode-{index}", FOREVER, tmp_path, guard, role="decode") for index in (0, 1)
        )
        async with running(first, reports=reports) as (supervising, _):
            supervising.is_settled = True
            await supervising.add(second)
            assert supervising.staying("decode") == ["decode-0", "decode-1"]
            pid = second.pid
            os.kill(pid, signal.SIGKILL)
            await until(lambda: supervising.pids.get("decode-1", pid) != pid)
            with pytest.raises(ValueError, match="decode-1"):
                await supervising.add(child("decode-1", FOREVER, tmp_path, guard))
    assert reports == ["decode-1 was killed by SIGKILL; starting it again"]
    assert not second.is_running


async def test_a_removed_child_drains_and_does_not_come_back(tmp_path: Path) -> None:
    reports: list[str] = []
    async with Guard() as guard:
        leaving, other = (
            child("decode-0", LEAVING, tmp_path, guard),
            child("decode-1", FOREVER, tmp_path, guard),
        )
        async with running(leaving, other, reports=reports) as (supervising, task):
            supervising.is_settled = True
            await until(lambda: "up" in leaving.log_file.read_text())
            removing = asyncio.create_task(supervising.remove("decode-0", 5.0))
            await until(lambda: removing.done() or supervising.life("decode-0").state == "draining")
            assert supervising.staying("prefill") == ["decode-1"]
            await removing
            assert supervising.names == ["decode-1"]
            assert not leaving.is_running
            assert not task.done()
    assert reports == []


async def test_a_child_that_will_not_drain_is_killed_after_its_grace(tmp_path: Path) -> None:
    async with Guard() as guard:
        stubborn, other = child("a-0", STUBBORN, tmp_path, guard), child("a-1", FOREVER, tmp_path, guard)
        async with running(stubborn, other, reports=[]) as (supervising, _):
            supervising.is_settled = True
            await until(lambda: "up" in stubborn.log_file.read_text())
            pid = stubborn.pid
            await supervising.remove("a-0", 0.1)
            assert is_gone(pid)
            assert supervising.names == ["a-1"]


async def test_one_that_is_given_up_can_be_removed(tmp_path: Path) -> None:
    reports: list[str] = []
    async with Guard() as guard:
        failing, other = child("a-0", FAILING, tmp_path, guard), child("a-1", FOREVER, tmp_path, guard)
        supervising = Supervisor([failing, other], report=reports.append, rng=random.Random(0))
        supervising.is_settled = True
        task = asyncio.create_task(supervising.run())
        await until(lambda: supervising.life("a-0").state == "failed")
        assert supervising.life("a-0").reason == "ended with status 1"
        await supervising.remove("a-0", 5.0)
        assert supervising.names == ["a-1"]
        task.cancel()
        await asyncio.wait([task])
        await supervising.stop([supervising.names], grace_s=5.0)
