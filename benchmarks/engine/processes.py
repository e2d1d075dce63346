"""The sides' processes: starts them, asks them, ends them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baton.models import ModelDir
from benchmarks.clients.environments import NotInstalledError, prepare
from benchmarks.clients.vllm_bench import VLLM_BENCH

HERE = Path(__file__).parent
READY_S = 300.0
END_S = 20.0
OURS, PLAIN, COMPILED = "baton", "baton, plain torch", "baton, compiled"
TRANSFORMERS, VLLM = "transformers", "vLLM"
SIDES = (OURS, PLAIN, COMPILED, TRANSFORMERS, VLLM)
PEERS = (TRANSFORMERS, VLLM)


class SideError(Exception):
    """A side cannot be asked; the message says why."""


class Side:
    """One engine's process."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    def seconds(self, prompts: Sequence[int], num_tokens: int) -> float:
        """Of prompts of these lengths, all at once, until each has so many tokens."""
        assert self._process.stdin is not None
        print(
            json.dumps({"prompts": list(prompts), "tokens": num_tokens}), file=self._process.stdin, flush=True
        )
        return float(self.hear()["seconds"])

    def hear(self) -> dict[str, Any]:
        """Its next line; raises SideError with its last words if there is none."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = " ".join(self._log.read_text(encoding="utf-8", errors="replace").split())
            raise SideError(f"{self.name} ended; it said last: {said[-800:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def started(name: str, model: ModelDir, *, threads: int, peers: Path, logs: Path) -> Iterator[Side]:
    """A side that has loaded the model; raises SideError if it cannot."""
    log = logs / f"{name.replace(' ', '-').replace(',', '')}.log"
    facts = (str(model.path), str(threads), str(model.model_config.vocab_size))
    command = [*_command(name, peers), *facts, *_kernels(name)]
    with log.open("w", encoding="utf-8") as words:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            # As a worker has it: without it every thread of every library would be one too many.
            env=_environment(threads),
        )
    try:
        side = Side(name, process, log)
        side.hear()
        yield side
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _command(name: str, peers: Path) -> list[str]:
    if name == VLLM:
        try:
            programs = prepare(VLLM_BENCH, peers.resolve())
        except NotInstalledError as error:
            raise SideError(f"{name} cannot be installed: {error}") from None
        return [str(programs / "python"), str(HERE / "side_vllm.py")]
    return [
        sys.executable,
        "-m",
        f"benchmarks.engine.side_{'transformers' if name == TRANSFORMERS else 'baton'}",
    ]


def _kernels(name: str) -> list[str]:
    return {OURS: ["auto"], PLAIN: ["torch"], COMPILED: ["compile"]}.get(name, [])


def _environment(threads: int) -> dict[str, str]:

    return {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
