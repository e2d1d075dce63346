"""Runs work on behalf of a future: the end of every queue of calls that an engine's threads read."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def fulfil(future: Future[Any], work: Callable[[], Any]) -> None:
    """Does the work and gives what it returned, or raised, to whoever waits.

    Does nothing if the caller gave up before the work began.
    """
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  (it is handed to the awaiting caller)
        future.set_exception(error)
    else:
        future.set_result(result)
