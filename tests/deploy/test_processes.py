"""What the laptop example's containers run, as processes here: they find each other and both doors answer.

Taken from the rendered manifests: commands, environment, settings file, Redis' script. Mapped, because this
is one machine and no cluster: paths of mounts to folders of the test, names and addresses to 127.0.0.1, ports
to free ones, and the model to a tiny one. Ray's pod is left out: its worker runs as a plain process with the
same table of settings.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.free_ports import claim
from baton.redis_server import find_binary
from baton.tether import tethered
from benchmarks.tiny_llama import write_tiny_model
from tests.deploy.manifests import Object, config_of, of_example, pods

EXAMPLE = "laptop-cpu"
PORTS = (50051, 50052, 50053, 50054, 50055, 50060, 50061, 8000, 6379)


class Machine:
    """One machine instead of a cluster: where things are here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {port: str(claim(0, "port")) for port in PORTS}
        # Two pods have this one, each for itself.
        self.decode_port = str(claim(0, "port"))

    def mapped(self, text: str) -> str:
        """A text of the manifests, as it has to be here."""
        here = {
            "/etc/baton": f"{self.folder}/etc",
            "/tmp/": f"{self.folder}/tmp/",
            "/var/cache/baton": f"{self.folder}/cache",
            "0.0.0.0": "127.0.0.1",
        }
        # In one pass: what a place is replaced by may hold another one's name.
        text = re.sub("|".join(map(re.escape, here)), lambda found: here[found[0]], text)
        text = re.sub(r"demo-baton-(redis|grpc|http)(:\d+)?", self._address, text)
        return re.sub(r"(?<=port = )\d+", lambda found: self.ports[int(found[0])], text)

    def _address(self, found: re.Match[str]) -> str:
        port = {"redis": 6379, "grpc": 50051, "http": 8000}[found[1]]
        return f"127.0.0.1:{self.ports[port]}"

    def environment(self, container: Object, name: str) -> dict[str, str]:
        """Of a container, and of nothing else but what finds programs."""
        of_pod = {"POD_IP": "127.0.0.1", "POD_NAME": name}
        values = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", **of_pod}
        for variable in container.get("env", []):
            if "value" in variable:
                text = re.sub(r"\$\((\w+)\)", lambda found: of_pod[found[1]], variable["value"])
                values[variable["name"]] = self.mapped(text)
        return values

    def start(self, command: list[str], environment: dict[str, str], name: str) -> subprocess.Popen[bytes]:
        words = [sys.executable if word == "python" else self.mapped(word) for word in command]
        with (self.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(tethered(words), env=environment, stdout=log, stderr=log)


@contextmanager
def running(machine: Machine) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Redis, router, prefill and decode; all get SIGTERM at the end, and leave in order."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for pod in pods(of_example(EXAMPLE)):
            if pod.component not in ("redis", "router", "prefill"):
                continue
            (container,) = pod.spec["containers"]
            command = list(container["command"])
            if pod.component == "redis":
                listen = f"redis-server --bind 127.0.0.1 --port {machine.ports[6379]} "
                command[-1] = command[-1].replace("redis-server ", listen)
            name = f"demo-{pod.component}-0"
            started[name] = machine.start(command, machine.environment(container, name), name)
            if pod.component == "prefill":
                own = {"BATON_DECODE_NAME": "decode-0", "BATON_DECODE_HOST": "127.0.0.1"}
                own["BATON_DECODE_PORT"] = machine.decode_port
                environment = {**machine.environment(container, "decode-0"), **own}
                started["decode-0"] = machine.start(
                    ["python", "-m", "decode_worker"], environment, "decode-0"
                )
        yield started
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait(30)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    for name in ("etc/config", "etc/redis", "tmp", "cache", "bin"):
        (tmp_path / name).mkdir(parents=True)
    model = tmp_path / "model"
    write_tiny_model(model)
    text = machine.mapped(config_of(of_example(EXAMPLE)))
    text = re.sub(r'(?<=model = )".*"', f'"{model}"', text)
    (tmp_path / "etc/config/baton.toml").write_text(text)
    # Whatever somebody's own Secret may hold.
    (tmp_path / "etc/redis/password").write_text("with spaces, #, > and $HOME")
    (tmp_path / "bin/redis-server").symlink_to(find_binary())
    return machine


def test_the_containers_commands_serve_and_helms_test_passes(machine: Machine) -> None:
    written: dict[str, Any] = tomllib.loads((machine.folder / "etc/config/baton.toml").read_text())
    assert written["router"]["redis_url"].startswith("redis://baton@127.0.0.1:")
    (test,) = [pod for pod in pods(of_example(EXAMPLE)) if pod.component == "test"]
    (container,) = test.spec["containers"]
    with running(machine) as processes:
        asked = subprocess.run(
            [sys.executable, *container["command"][1:], "--wait-s=60"],
            env=machine.environment(container, "demo-baton-test"),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        logs = {name: (machine.folder / f"{name}.log").read_text()[-2_000:] for name in processes}
        assert asked.returncode == 0, (asked.stderr, logs)
        by_grpc, by_http = re.findall(r"^(?:gRPC|OpenAI) door: (.+)$", asked.stderr, re.MULTILINE)
        assert by_grpc == by_http != "''"
        assert all(process.poll() is None for process in processes.values())
    ended = {name: process.returncode for name, process in processes.items() if "redis" not in name}
    assert set(ended.values()) == {0}, (ended, logs)
