"""A process of the transfer benchmark, and how its parent talks to it.

    parent  --> {"do": name, ...arguments}     one line of JSON on a socket
    child   --> {"is": result}                 one line on the same
            --> {"error": class, "words": ..., "at": time.monotonic()}

The child runs one command after the other on an event loop, and ends with its input, or with its parent. What
anything in it prints goes to standard error. A role is a module benchmarks.on_gpu.transfer_ROLE with a class
Role.

Forked, which takes no second import of torch: so the parent must never touch a GPU, nor compute with torch.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import select
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

from baton.errors import BatonError
from benchmarks.on_gpu.apart import end_with_parent

_MAX_LINE_BYTES = 1 << 24
_END_S = 5.0

# The parent's ends of the sockets to all of its children. A new child inherits them, and closes them: or the
# others would never see the end of their input.
_ends: set[socket.socket] = set()


class ChildError(Exception):
    """What a child answered instead of a result. kind: the class of its error.  at: time.monotonic()."""

    def __init__(self, role: str, kind: str, words: str, at: float) -> None:
        super().__init__(f"{role}: {kind}: {words}")
        self.kind = kind
        self.at = at


class Child:
    """One process in a role. Every wait has a deadline; close() ends it, whatever it does."""

    def __init__(self, role: str) -> None:
        self.role = role
        # Imported here, every child has it.
        made = importlib.import_module(f"benchmarks.on_gpu.transfer_{role}").Role
        self._socket, theirs = socket.socketpair()
        _ends.add(self._socket)
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_serve, args=(made, theirs, os.getpid()))
        self._process.start()
        theirs.close()
        self._received = b""

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, name: str, **arguments: Any) -> None:
        """Gives a command."""
        self._socket.sendall(json.dumps({"do": name, **arguments}).encode() + b"\n")

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
        _ends.discard(self._socket)
        self._socket.close()
        self._process.join(_END_S)
        self._process.kill()
        self._process.join()

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                raise TimeoutError(f"{self.role} did not answer in time")
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionError(f"the process of {self.role} has ended")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line


def _serve(made: Any, answers: socket.socket, parent: int) -> None:
    end_with_parent(parent)
    for end in _ends:
        end.close()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asyncio.run(_obey(made, answers))


async def _obey(made: Any, answers: socket.socket) -> None:
    """Runs commands until the input ends."""
    commands, replies = await asyncio.open_connection(sock=answers, limit=_MAX_LINE_BYTES)
    role = made()
    try:
        # Its parent may be gone before its answer is there.
        with suppress(ConnectionError):
            while line := await commands.readline():
                result = await _result(role, json.loads(line))
                replies.write(json.dumps(result).encode() + b"\n")
                await replies.drain()
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
