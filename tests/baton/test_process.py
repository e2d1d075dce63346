"""How roles start, stop and fail as processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.errors import BatonError, ConfigError, ModelError, Unavailable
from baton.process import report_errors, run, run_until, stop_on_signals, unless_stopped, write_ready_file

GUARD_S = 5


def test_a_role_that_returns_is_a_success() -> None:
    async def role(stop: asyncio.Event) -> None:
        assert not stop.is_set()

    assert run(role) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_role_drain_and_return(number: signal.Signals) -> None:
    drained = []

    async def role(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        async with asyncio.timeout(GUARD_S):
            await stop.wait()
        drained.append(True)

    assert run(role) == 0
    assert drained == [True]


@pytest.mark.parametrize(
    ("error", "status"),
    [(Unavailable("Redis is away"), 1), (ConfigError("the port is taken"), 2), (ModelError("no head"), 5)],
)
def test_an_error_of_ours_is_told_and_the_status_says_who_has_to_act(error: BatonError, status: int) -> None:
    async def role(stop: asyncio.Event) -> None:
        raise error

    assert run(role) == status


def test_a_defect_is_a_failure_whose_traceback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def role(stop: asyncio.Event) -> None:
        raise ZeroDivisionError

    assert run(role) == 1
    (record,) = caplog.records
    assert isinstance(record.msg, dict)
    assert record.msg["exc_info"] is not None


def test_the_ready_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    write_ready_file(str(path), address="127.0.0.1:1", pid=3)
    assert json.loads(path.read_text()) == {"address": "127.0.0.1:1", "pid": 3}
    write_ready_file(str(path), pid=4)
    assert json.loads(path.read_text()) == {"pid": 4}
    assert list(tmp_path.iterdir()) == [path]


def test_no_ready_file_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_ready_file("", pid=3)
    assert list(tmp_path.iterdir()) == []


class Service:
    def __init__(self) -> None:
        self.is_running = False
        self.was_cancelled = False

    async def run(self) -> None:
        self.is_running = True
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        finally:
            self.is_running = False


async def test_services_run_while_draining_and_are_cancelled_afterwards() -> None:
    stop, service, seen = asyncio.Event(), Service(), []

    async def drain() -> None:
        seen.append((service.is_running, service.was_cancelled))

    async with asyncio.timeout(GUARD_S):
        running = asyncio.create_task(run_until(stop, service.run(), drain=drain))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert service.is_running
        assert seen == []
        stop.set()
        await running
    assert seen == [(True, False)]
    assert (service.is_running, service.was_cancelled) == (False, True)


async def test_a_service_that_fails_ends_the_others_and_is_raised() -> None:
    other = Service()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        async with asyncio.timeout(GUARD_S):
            await run_until(asyncio.Event(), other.run(), fail())
    assert other.was_cancelled


async def test_a_service_that_fails_while_draining_ends_the_drain() -> None:
    stop, failing = asyncio.Event(), asyncio.Event()

    async def fail() -> None:
        await failing.wait()
        raise OSError("device")

    async def drain() -> None:
        failing.set()
        await asyncio.Event().wait()

    stop.set()
    with pytest.raises(OSError, match="device"):
        async with asyncio.timeout(GUARD_S):
            await run_until(stop, fail(), Service().run(), drain=drain)


async def test_what_takes_long_is_given_up_when_the_role_is_stopped() -> None:
    stop, work = asyncio.Event(), Service()
    async with asyncio.timeout(GUARD_S):
        waiting = asyncio.create_task(unless_stopped(stop, work.run()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert work.is_running
        stop.set()
        assert await waiting is None
    assert work.was_cancelled


async def test_what_is_done_in_time_is_returned_or_raised() -> None:
    async def load(failure: Exception | None) -> str:
        if failure is not None:
            raise failure
        return "model"

    assert await unless_stopped(asyncio.Event(), load(None)) == "model"
    with pytest.raises(ConfigError, match="no such folder"):
        await unless_stopped(asyncio.Event(), load(ConfigError("no such folder", field="model")))


DEAF = """
import asyncio
from baton.process import run

async def role(stop):
    print("started", flush=True)
    await stop.wait()
    print("stopped", flush=True)
    await asyncio.Event().wait()

run(role)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_of_a_kind_ends_a_process_that_drains(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "started\n"
        child.send_signal(number)
        assert child.stdout.readline() == "stopped\n"
        child.send_signal(number)
        assert child.wait(GUARD_S) == -number


async def test_a_service_that_just_ends_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="nobody stopped it"):
        async with asyncio.timeout(GUARD_S):
            await run_until(asyncio.Event(), asyncio.sleep(0))


async def test_a_cancelled_role_cancels_its_services() -> None:
    service = Service()
    running = asyncio.create_task(run_until(asyncio.Event(), service.run()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert service.was_cancelled


def test_a_wrong_setting_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise ConfigError("threads is -1 (flag --threads)", field="threads")

    assert report_errors(main) == 2
    assert capsys.readouterr().err == "error: threads is -1 (flag --threads)\n"


def test_a_status_is_passed_on_and_a_defect_is_a_traceback_and_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert report_errors(lambda: 7) == 7
    assert report_errors(lambda: 1 // 0) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


UNDER_A_THREAD = """
import threading
from baton.process import leave, report_errors, run

async def role(stop):
    threading.Thread(target=threading.Event().wait).start()
    raise OSError("device")

leave(report_errors(lambda: run(role)))
"""


def test_a_role_that_fails_leaves_although_a_thread_of_it_is_stuck() -> None:
    child = subprocess.run([sys.executable, "-c", UNDER_A_THREAD], timeout=60, check=False)
    assert child.returncode == 1


async def test_signals_can_be_taken_back_from_a_library() -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        stop_on_signals(stop)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await stop.wait()
        assert stop.is_set()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
