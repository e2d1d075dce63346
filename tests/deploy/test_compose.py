"""The Compose file: by the specification, in itself, and as processes that serve a request."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import pytest
from redis.exceptions import AuthenticationError, NoPermissionError

from baton import AsyncClient
from baton.cluster.free_ports import LOOPBACK, claim
from baton.readiness import wait_ready
from baton.redis_client import open_redis
from baton.redis_server import find_binary
from baton.rpc import open_channel
from benchmarks.tiny_llama import write_tiny_model
from tests.deploy import compose_file
from tests.deploy.compose_file import Service, argv, environment, seconds, services
from tests.deploy.dockerfile import ROOT
from tests.integration.oracle import assert_greedy

PROFILES = ("cpu", "gpu")
SCHEMA = json.loads(Path(__file__).with_name("compose_schema.json").read_text(encoding="utf-8"))
ROLES = {"cpu": ("router", "prefill-0", "decode-0"), "gpu": ("router", "prefill-gpu-0", "decode-gpu-0")}
MODEL = "tiny"
# Longer than what a decode worker may compute itself.
PROMPT = [40 + index % 200 for index in range(300)]


def settings(service: Service) -> dict[str, str]:
    """The settings of a role, by their names."""
    role = argv(service)[-1].removesuffix("_worker").upper()
    prefix = f"BATON_{role}_"
    given = environment(service)
    return {name.removeprefix(prefix).lower(): given[name] for name in given if name.startswith(prefix)}


def test_the_specification_takes_it() -> None:
    validator = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)
    assert [error.message for error in validator.iter_errors(compose_file.read())] == []


def test_what_the_specification_does_not_know_is_found() -> None:
    found = compose_file.read()
    found["services"]["router"]["cap_dorp"] = ["ALL"]
    with pytest.raises(jsonschema.ValidationError, match="cap_dorp"):
        jsonschema.validate(found, SCHEMA)


@pytest.mark.parametrize("profile", PROFILES)
def test_everything_named_is_there(profile: str) -> None:
    whole, started = compose_file.read(), services(profile)
    for service in started.values():
        assert set(service["networks"]) <= set(whole["networks"])
        assert set(service["secrets"]) <= set(whole["secrets"])
        assert {volume.partition(":")[0] for volume in service.get("volumes", [])} <= set(whole["volumes"])
        for name, dependency in service.get("depends_on", {}).items():
            assert name in whole["services"]
            assert name in started or not dependency.get("required", True)
            is_healthy = dependency["condition"] == "service_healthy"
            assert not is_healthy or "healthcheck" in whole["services"][name]
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()
            assert (ROOT / "deploy" / service["build"]["context"]).resolve() == ROOT
    assert set(ROLES[profile]) | {"redis"} == {name for name in started if not name.startswith("pull")}


@pytest.mark.parametrize("profile", PROFILES)
def test_nobody_may_more_than_is_needed(profile: str) -> None:
    for name, service in services(profile).items():
        assert service["user"] == "10001:10001"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "cap_add"} & set(service)
        # What is written to outside volumes is in memory.
        assert any(mount.startswith("/tmp:") for mount in service["tmpfs"])
        models = [v for v in service.get("volumes", []) if v.startswith("models:")]
        assert all(volume.endswith(":ro") for volume in models) or name.startswith("pull")


@pytest.mark.parametrize("profile", PROFILES)
def test_only_the_router_can_be_reached_and_only_from_this_host(profile: str) -> None:
    started = services(profile)
    published = {name: service["ports"] for name, service in started.items() if service.get("ports")}
    assert list(published) == ["router"]
    router = settings(started["router"])
    inner = [port.rpartition(":") for port in published["router"]]
    assert [port for _, _, port in inner] == [router["port"], router["http_port"], router["admin_port"]]
    assert all(outer.startswith("127.0.0.1:") for outer, _, _ in inner)
    assert compose_file.read()["networks"]["cluster"] == {"internal": True}
    outside = {name for name, service in started.items() if "outside" in service["networks"]}
    assert outside == {"router", "pull" if profile == "cpu" else "pull-gpu"}


@pytest.mark.parametrize("profile", PROFILES)
def test_workers_announce_the_name_by_which_they_are_found(profile: str) -> None:
    started = services(profile)
    for name in ROLES[profile][1:]:
        own = settings(started[name])
        assert own["name"] == name
        assert own["advertise"] == "{name}:{port}"
        assert own["shm_folder"] == "/kv"
        assert "kv:/kv" in started[name]["volumes"]
    redis = {settings(started[name])["redis_url"] for name in ROLES[profile]}
    assert redis == {"redis://baton@redis:6379/0?password_file=/run/secrets/redis_password"}
    assert started["redis"]["secrets"] == ["redis_password"]


@pytest.mark.parametrize("profile", PROFILES)
def test_everybody_has_the_time_to_drain(profile: str) -> None:
    for name in ROLES[profile]:
        service = services(profile)[name]
        assert seconds(service["stop_grace_period"]) == float(settings(service)["drain_s"]) + 15


def test_the_gpu_profile_computes_on_devices_that_it_reserves() -> None:
    started = services("gpu")
    for name in ROLES["gpu"][1:]:
        (device,) = started[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        assert settings(started[name])["device"] == "cuda"
        assert started[name]["image"].startswith("baton/worker-cuda:")
    assert not any("deploy" in service for service in services("cpu").values())


class Host:
    """Runs containers' commands as processes of this machine: other paths, ports and names, nothing else."""

    def __init__(self, folder: Path, started: Mapping[str, Service]) -> None:
        self.folder = folder
        self.started = started
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.redis_port = claim(0, "redis")
        self._ports: dict[tuple[str, str], str] = {}
        (folder / "redis_password").write_text("5ecret" * 5 + "\n", encoding="utf-8")
        for name in ("kv", "tmp", "cache"):
            (folder / name).mkdir(exist_ok=True)

    def here(self, text: str) -> str:
        """A text of a container, with paths and the address of Redis as they are on this machine."""
        inner = {"/run/secrets": ".", "/var/cache/baton": "cache", "/kv": "kv", "/tmp": "tmp"}
        pattern = rf"(?<![\w/])({'|'.join(inner)})(?=[/\s\")?]|$)"
        text = re.sub(pattern, lambda found: str(self.folder / inner[found[0]]), text)
        return text.replace("@redis:6379", f"@{LOOPBACK}:{self.redis_port}")

    def port(self, name: str, setting: str) -> int:
        """Instead of the one that a service has in its container."""
        return int(self._ports.setdefault((name, setting), str(claim(0, setting))))

    def variables(self, name: str) -> dict[str, str]:
        found = {}
        for key, value in environment(self.started[name]).items():
            if key.endswith("_PORT"):
                found[key] = str(self.port(name, key))
            elif key.endswith("HOST"):
                assert value == "0.0.0.0"
                found[key] = LOOPBACK
            else:
                found[key] = value.replace("{name}", LOOPBACK) if "ADVERTISE" in key else self.here(value)
        # A cluster for a test, on cores that others use as well.
        role = argv(self.started[name])[-1].removesuffix("_worker").upper()
        if role != "ROUTER":
            found |= {f"BATON_{role}_DTYPE": "float32", f"BATON_{role}_THREADS": "1"}
            found |= {f"BATON_{role}_KV_CACHE_BYTES": str(16 << 20)}
        return {**found, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                argv(self.started[name]), env=self.variables(name), cwd="/", stdout=log, stderr=log
            )

    def start_redis(self) -> None:
        *shell, script = self.started["redis"]["command"]
        script = self.here(script)
        begin = f"exec redis-server --port {self.redis_port} --bind {LOOPBACK} --dir {self.folder}/tmp "
        assert script.count("exec redis-server ") == 1
        with (self.folder / "redis.log").open("wb") as log:
            self.running["redis"] = subprocess.Popen(
                [*shell, script.replace("exec redis-server ", begin)], env=self._redis_env(), stdout=log
            )

    def redis_is_healthy(self) -> bool:
        kind, command = self.started["redis"]["healthcheck"]["test"]
        assert kind == "CMD-SHELL"
        command = self.here(command).replace("redis-cli ", f"redis-cli -p {self.redis_port} ")
        ran = subprocess.run(["sh", "-c", command], env=self._redis_env(), capture_output=True, check=False)
        return ran.returncode == 0

    def healthy(self, name: str) -> tuple[int, str]:
        kind, *command = self.started[name]["healthcheck"]["test"]
        assert kind == "CMD"
        ran = subprocess.run(
            command, env=self.variables(name), cwd="/", capture_output=True, text=True, check=False
        )
        return ran.returncode, ran.stdout

    def events(self, name: str, event: str) -> list[dict[str, object]]:
        """What a process has logged of that kind."""
        lines = (self.folder / f"{name}.log").read_text(encoding="utf-8").splitlines()
        told = [json.loads(line) for line in lines if line.startswith("{")]
        return [found for found in told if found["event"] == event]

    def stop(self, name: str) -> int:
        process = self.running.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(10)

    def _redis_env(self) -> dict[str, str]:
        return {"PATH": f"{find_binary().parent}:{os.environ['PATH']}"}


@contextmanager
def host(folder: Path, started: Mapping[str, Service]) -> Iterator[Host]:
    made = Host(folder, started)
    try:
        yield made
    finally:
        for process in made.running.values():
            process.kill()
            process.wait()


async def test_its_commands_serve_a_request_and_end_when_told(tmp_path: Path) -> None:
    """With the password, rights and settings of the file; the answer is that of transformers."""
    started = services("cpu", BATON_MODEL=MODEL)
    reference = write_tiny_model(tmp_path / "cache" / "models" / MODEL)
    with host(tmp_path, started) as here:
        here.start_redis()
        async with asyncio.timeout(10):
            while not await asyncio.to_thread(here.redis_is_healthy):
                await asyncio.sleep(0.05)
        for name in ROLES["cpu"]:
            here.start(name)
        address = f"{LOOPBACK}:{here.port('router', 'BATON_ROUTER_PORT')}"
        assert await wait_ready(address, open_channel, wait_s=60, waiting=lambda _: None)
        for name in ROLES["cpu"]:
            # A router takes requests with a decode worker alone; the other one may load a moment longer.
            async with asyncio.timeout(30):
                while await asyncio.to_thread(here.healthy, name) != (0, "readiness: SERVING\n"):
                    await asyncio.sleep(0.2)
            assert await wait_ready(address, open_channel, wait_s=60, waiting=lambda _: None)
        async with await AsyncClient.connect(address) as client:
            generation = client.generate(token_ids=PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
            tokens = [token async for chunk in generation for token in chunk.token_ids]
        assert len(tokens) == 8
        assert_greedy(reference, PROMPT, tokens)
        # From the prefill worker, through the memory that both have.
        assert generation.summary.timings.transfer_bytes > 0
        assert [event["transport"] for event in here.events("prefill-0", "paired")] == ["shm"]
        await _redis_refuses(here)
        assert [here.stop(name) for name in (*ROLES["cpu"], "redis")] == [0, 0, 0, 0]


async def _redis_refuses(here: Host) -> None:
    """Strangers, other keys, and commands that Baton does not need."""
    own = here.variables("router")["BATON_ROUTER_REDIS_URL"]
    async with open_redis(own) as redis:
        with pytest.raises(NoPermissionError):
            await redis.get("others:key")
        for command in ("FLUSHALL", "CONFIG GET *", "EVAL return 0", "ACL WHOAMI"):
            with pytest.raises(NoPermissionError):
                await redis.execute_command(*command.split())
    async with open_redis(f"redis://{LOOPBACK}:{here.redis_port}/0") as stranger:
        with pytest.raises(AuthenticationError):
            await stranger.ping()
