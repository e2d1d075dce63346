"""A cluster as a user starts it: `baton up` in a process of its own, on free ports."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.cache import model_folder
from benchmarks.clients.processes import ProgramError, finish, started, tail
from benchmarks.clients.runs import Target

BATON = (sys.executable, "-m", "baton.cli.main")
PORTS = ("port", "http-port", "admin-port", "control-port")
KV_CACHE_BYTES = 512 << 20
PULL_S = 600.0
START_S = 180.0
PAUSE_S = 0.2


@contextmanager
def cluster(model: str, folder: Path, trace: Path) -> Iterator[Target]:
    """A prefill and a decode worker in bfloat16 without Ray, ended at the end; their spans go to trace."""
    finish((*BATON, "pull", model), log=folder / "pull.log", timeout_s=PULL_S)
    command = (
        *(*BATON, "up", "--model", model, "--dtype", "bfloat16", "--no-ray", "--json"),
        *(word for port in PORTS for word in (f"--{port}", "0")),
        *("--kv-cache-bytes", str(KV_CACHE_BYTES), "--trace-file", str(trace)),
    )
    out, err = folder / "up.json", folder / "up.log"
    with started(command, out=out, err=err) as program:
        url = _address(program, out, err)
        yield Target(url=url.removesuffix("/v1"), model=model, tokenizer=str(model_folder(model)))


def _address(program: subprocess.Popen[bytes], out: Path, err: Path) -> str:
    """Of its HTTP port, once requests are taken."""
    until = time.monotonic() + START_S
    while not (text := out.read_text(encoding="utf-8")).endswith("\n"):
        if program.poll() is not None or time.monotonic() > until:
            raise ProgramError(f"baton up does not serve; {tail(err)}")
        time.sleep(PAUSE_S)
    return str(json.loads(text)["http"][0])
