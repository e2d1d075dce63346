"""Programs that are started, waited for and ended, each by its own id.

Knows no program.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# How much of what a program said last is repeated when it fails.
TAIL_CHARACTERS = 1500
END_S = 30.0


class ProgramError(Exception):
    """A program failed or took too long; the message has what it said last."""


@contextmanager
def started(
    command: Sequence[str],
    *,
    out: Path,
    err: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a process group of its own, which is gone at the end, with all it started."""
    with out.open("wb") as stdout, err.open("ab") as stderr:
        program = subprocess.Popen(
            command,
            stdout=stdout,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env=None if env is None else {**os.environ, **env},
            start_new_session=True,
        )
    try:
        yield program
    finally:
        _end(program)


def finish(
    command: Sequence[str],
    *,
    log: Path,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Runs a program to its end; raises ProgramError unless that comes in time and well."""
    with started(command, out=log, err=log, cwd=cwd, env=env) as program:
        try:
            status = program.wait(timeout_s)
        except subprocess.TimeoutExpired:
            message = f"{Path(command[0]).name} took longer than {timeout_s:g} s; {tail(log)}"
            raise ProgramError(message) from None
    if status != 0:
        raise ProgramError(f"{Path(command[0]).name} ended with status {status}; {tail(log)}")


def tail(log: Path) -> str:
    """What a program said last, in one line."""
    said = log.read_text(encoding="utf-8", errors="replace")
    return "it said last: " + " ".join(said.split())[-TAIL_CHARACTERS:]


def _end(program: subprocess.Popen[bytes]) -> None:
    """An interrupt first, as a cluster then ends its own; what is left of the group is killed."""
    if program.poll() is None:
        program.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            program.wait(END_S)
    # As long as a group has members its id is nobody else's, also after its leader has ended.
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()
