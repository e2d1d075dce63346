"""A process of its own with a pipe to it, for benchmarks that need two.

Owns the process. What is said over the pipe is between its function and whoever holds the Child.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from engine.host_memory import keep_freed_memory

# Longer than anything that is asked takes on a slow machine.
ANSWER_S = 120.0
END_S = 10.0


class Child:
    """Runs function(*arguments, pipe) in a new process; the function ends when the pipe does."""

    def __init__(self, function: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(function, *arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self) -> Any:
        """What it says next; raises TimeoutError if it says nothing, EOFError if it is gone."""
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"the process said nothing for {ANSWER_S:g} s")
        return self._pipe.recv()

    def ask(self, question: object) -> Any:
        """Its answer to a question."""
        self._pipe.send(question)
        return self.hear()

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()


def _run(function: Callable[..., None], *arguments: object) -> None:
    # As in a worker: without it every large message pays for fresh pages.
    keep_freed_memory()
    function(*arguments)
