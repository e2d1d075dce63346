"""Runs a Python module as a child process that reports its progress line by line.

The command line uses children for what needs torch, pip or a long network wait. Knows
nothing of what they do. A progress line is `progress DONE TOTAL`; pip's raw progress bar
(`Progress DONE of TOTAL`) is understood as well.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

_PROGRESS = re.compile(r"progress (\d+)(?: of)? (\d+)", re.IGNORECASE)
# Where this package and its neighbors were imported from: a child must find the same ones,
# and nothing that happens to lie in the user's working directory.
_ROOT = Path(__file__).resolve().parent.parent


class ChildError(Exception):
    """A child ended with a status other than 0; holds the last lines of its standard error."""

    def __init__(self, module: str, status: int, last_lines: str) -> None:
        super().__init__(f"python -m {module} ended with status {status}: {last_lines or 'no message'}")
        self.status = status
        self.last_lines = last_lines


def run_module(
    module: str,
    arguments: Sequence[str],
    *,
    report: Callable[[int, int], None],
    hold_fd: int,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs `python -m module arguments` to its end, calling report(done, total) on each progress line.

    hold_fd stays open in the child, so that a file lock on it outlives a killed parent for
    as long as the child still writes. Paths among the arguments must be absolute. Raises
    ChildError.
    """
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=_ROOT,
            env={**os.environ, **(environment or {})},
            pass_fds=(hold_fd,),
        ) as child,
    ):
        try:
            _follow(child, report)
        except BaseException:
            child.kill()
            raise
        if child.wait() != 0:
            raise ChildError(module, child.returncode, _last_lines(errors))


def _follow(child: subprocess.Popen[str], report: Callable[[int, int], None]) -> None:
    for line in child.stdout or ():
        if match := _PROGRESS.match(line):
            report(int(match[1]), int(match[2]))


def _last_lines(errors: IO[bytes], count: int = 2) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return " ".join(line.strip() for line in lines[-count:])
