"""Ties a child process to its parent: when the parent dies, however it dies, so does the child.

Owns one wrapper around a command line. Run as a script it asks the kernel for a
signal at the parent's death and then becomes the command. A preexec_fn would do
the same inside a forked copy of a process full of gRPC threads, which can hang.
It imports nothing of Baton, because it also runs under `python -I -S`.

Outside Linux the command runs unchanged; the parent's orderly exit is then all there is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def tethered(command: Sequence[str], *, signal_number: int = signal.SIGTERM) -> list[str]:
    """The command line that runs `command` as a child which gets a signal when this process dies.

    Start it from the main thread: the kernel counts the end of the starting thread as death.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(signal_number)), *command]


def _become(parent_pid: int, signal_number: int, command: Sequence[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal_number) != 0:
        sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    # The parent may have died before the request; its signal would then never come.
    if os.getppid() != parent_pid:
        sys.exit("the parent process is gone")
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    _become(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
