"""A process of the transfer benchmark, and how its parent talks to it.

    parent  --> {"do": name, ...arguments}     one line of JSON on its standard input
    child   --> {"is": result}                 one on what was its standard output
            --> {"error": class, "words": ..., "at": time.monotonic()}

The child runs one command after the other on an event loop, and ends with its input. What anything in it
prints goes to standard error. `python -m benchmarks.on_gpu.transfer_child ROLE` is the child; a role is a
module benchmarks.on_gpu.transfer_ROLE with a class Role.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import select
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.errors import BatonError
from benchmarks.on_gpu import bare

if TYPE_CHECKING:
    import torch

_ROOT = Path(__file__).parents[2]
_MAX_LINE_BYTES = 1 << 24
_END_S = 5.0


class ChildError(Exception):
    """What a child answered instead of a result. kind: the class of its error.  at: time.monotonic()."""

    def __init__(self, role: str, kind: str, words: str, at: float) -> None:
        super().__init__(f"{role}: {kind}: {words}")
        self.kind = kind
        self.at = at


class Child:
    """One process in a role. Every wait has a deadline; close() ends it, whatever it does."""

    def __init__(self, role: str, device: torch.device) -> None:
        self.role = role
        environment = dict(os.environ)
        if device.type == "cpu":
            environment["TRITON_INTERPRET"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.on_gpu.transfer_child", role],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            env=environment,
        )
        self._received = b""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def tell(self, name: str, **arguments: Any) -> None:
        """Gives a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, timeout_s: float) -> Any:
        """The result of the oldest command without one.

        Raises ChildError, TimeoutError, or ConnectionError if the process has ended.
        """
        said = json.loads(self._line(time.monotonic() + timeout_s))
        if "error" in said:
            raise ChildError(self.role, said["error"], said["words"], said["at"])
        return said["is"]

    def ask(self, name: str, timeout_s: float, **arguments: Any) -> Any:
        """Gives a command and waits for its result."""
        self.tell(name, **arguments)
        return self.hear(timeout_s)

    def kill(self) -> float:
        """Ends the process at once, as a failure of its machine would; returns time.monotonic()."""
        at = time.monotonic()
        self._process.kill()
        return at

    def close(self) -> None:
        """Ends the process and waits for its end. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise TimeoutError(f"{self.role} did not answer in time")
            received = os.read(descriptor, 1 << 16)
            if not received:
                raise ConnectionError(f"the process of {self.role} has ended")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line


async def _obey(role: Any, answers: int) -> None:
    """Runs commands until the input ends."""
    commands = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    try:
        # Its parent may be gone before its answer is there.
        with suppress(BrokenPipeError):
            while line := await commands.readline():
                result = await _result(role, json.loads(line))
                os.write(answers, json.dumps(result).encode() + b"\n")
    finally:
        await role.close()


async def _result(role: Any, command: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"is": await getattr(role, command.pop("do"))(**command)}
    except Exception as error:  # noqa: BLE001  (it is the answer)
        if not isinstance(error, BatonError):
            traceback.print_exc()
        kind = type(error).__name__
        return {"error": kind, "words": str(error), "at": time.monotonic()}


def main() -> None:
    """The child."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    bare.install()
    role = importlib.import_module(f"benchmarks.on_gpu.transfer_{sys.argv[1]}")
    asyncio.run(_obey(role.Role(), answers))


if __name__ == "__main__":
    main()
