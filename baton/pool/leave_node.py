"""`python -m baton.pool.leave_node`: drains this Ray node and its workers; returns once they have ended.

For what ends a node in order, such as a pod's preStop. Ray is told first, so that it places nothing here
again; then the workers get SIGTERM, as they may at any time: they end what they have or hand it over, and
their pool places them on another node. It reads /proc and runs Ray's command line; it joins no cluster.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.errors import ConfigError, Unavailable
from baton.process import leave, report_errors

PROC: Final = Path("/proc")
LOOK_EVERY_S: Final = 0.2
# Ray's command line takes seconds to start.
TELL_WITHIN_S: Final = 15.0
# What Ray calls the processes of our actors.
ACTORS: Final = (b"ray::DecodeWorker", b"ray::PrefillWorker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Raylet:
    """Ray's process of one node."""

    pid: int
    node_id: str
    gcs_address: str


def main() -> int:
    """Entry point. Status 0: nothing of Baton's runs here any more; 1: some did not end in time."""
    parser = argparse.ArgumentParser(prog="python -m baton.pool.leave_node", description=__doc__)
    parser.add_argument(
        "--timeout-s", type=float, default=60.0, help="longest time that workers are waited for"
    )
    parser.add_argument("--node-id", default="", help="which node, where several run on this machine")
    options = parser.parse_args()
    raylet = find_raylet(options.node_id)
    try:
        tell_ray(raylet, options.timeout_s)
    except Unavailable as error:
        # The workers drain all the same; at worst one is placed here once more.
        _say(f"warning: {error.message}")
    deadline_s = time.monotonic() + options.timeout_s
    left = workers_of(raylet)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    _say(f"{len(left)} workers drain")
    while left := [pid for pid in left if pid in workers_of(raylet)]:
        if time.monotonic() > deadline_s:
            raise Unavailable(f"processes {left} have not ended in {options.timeout_s:g} s")
        time.sleep(LOOK_EVERY_S)
    return 0


def find_raylet(node_id: str) -> Raylet:
    """Raises ConfigError, field "node_id", unless exactly one node is meant."""
    found = [
        Raylet(pid=pid, node_id=words[b"--node_id"].decode(), gcs_address=words[b"--gcs-address"].decode())
        for pid, line in _processes()
        if Path(os.fsdecode(line.split(b"\0")[0])).name == "raylet"
        and {b"--node_id", b"--gcs-address"} <= (words := _words(line)).keys()
    ]
    chosen = [raylet for raylet in found if node_id in ("", raylet.node_id)]
    if len(chosen) == 1:
        return chosen[0]
    if not found:
        raise ConfigError("no node of Ray runs on this machine; run this where one does", field="node_id")
    running = ", ".join(raylet.node_id for raylet in found)
    raise ConfigError(f"the nodes of Ray on this machine are {running}; name one: --node-id", field="node_id")


def workers_of(raylet: Raylet) -> list[int]:
    """Process ids of Baton's actors on that node; ended ones are not among them."""
    return [pid for pid, line in _processes() if line.startswith(ACTORS) and _parent(pid) == raylet.pid]


def tell_ray(raylet: Raylet, timeout_s: float) -> None:
    """Lets Ray place nothing on the node any more; raises Unavailable if it cannot be told."""
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
        *("--address", raylet.gcs_address, "--node-id", raylet.node_id),
        *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "its pod ends"),
        *("--deadline-remaining-seconds", str(max(1, round(timeout_s)))),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TELL_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"Ray at {raylet.gcs_address} did not answer in {TELL_WITHIN_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no reason").splitlines()[-1]
        raise Unavailable(f"Ray at {raylet.gcs_address} refused to drain the node: {last}")


def _processes() -> list[tuple[int, bytes]]:
    found = []
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                found.append((int(folder.name), (folder / "cmdline").read_bytes()))
    return found


def _words(line: bytes) -> dict[bytes, bytes]:
    pairs = (word.partition(b"=") for word in line.split(b"\0"))
    return {name: value for name, _, value in pairs}


def _parent(pid: int) -> int:
    with suppress(OSError, IndexError, ValueError):
        # The name in parentheses may hold anything.
        return int((PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    leave(report_errors(main))
