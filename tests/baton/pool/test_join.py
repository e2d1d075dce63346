"""Joining a Ray that is not there: an error with a remedy, and a process that ends when it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.cluster.free_ports import claim
from baton.errors import Unavailable
from baton.pool import ray_runtime

ROOT = Path(__file__).parents[3]


def test_nothing_at_the_address_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runtime, "JOIN_S", 0.2)
    monkeypatch.setattr(ray_runtime, "JOIN_PAUSE_S", 0.05)
    address = f"127.0.0.1:{claim(0, 'port')}"
    with pytest.raises(Unavailable, match=f"no Ray cluster answers at {address}: .*start one") as caught:
        ray_runtime._wait_for_port(address)
    assert "ray_address" in caught.value.message
    # Ray's own words for "the one that runs here".
    ray_runtime._wait_for_port("auto")


def test_a_pool_that_waits_for_ray_ends_when_it_is_told_to(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.idle_pool", f"--ray-address=127.0.0.1:{claim(0, 'port')}"]
    log = tmp_path / "log"
    with log.open("w") as words:
        process = subprocess.Popen(
            [*command, "--decode=1", "--control-port=0"], cwd=ROOT, stdout=words, stderr=words
        )
        try:
            # By then it waits: Ray is imported, which takes seconds.
            deadline = time.monotonic() + 60
            while "waits for Ray" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.wait()
