"""Runs a section of `benchmarks.gpu` in a process of its own.

A kernel that reads where it must not ruins its process's GPU for everything after it, and one that never ends
cannot be stopped: both cost their section, and nothing else. What a section allocates is gone with it.

Forked, which takes no second import of torch: so the parent must never touch a GPU, nor compute with torch.
A section may run parts of itself the same way. Nothing outlives the process that started it.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from benchmarks.on_gpu.section import Budget, GpuRow, Section

if TYPE_CHECKING:
    import torch

# For a section to notice that its time is over.
_GRACE_S = 5.0
# Of <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1


def rows_apart(
    section: Section,
    device: torch.device,
    budget: Budget,
    rows: Sequence[GpuRow] = (),
    *,
    grace_s: float = _GRACE_S,
) -> Iterator[GpuRow]:
    """A section's rows as they come, and a last one if it raised, crashed, or had to be killed.

    rows: of the sections before it.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    made = partial(section_rows, section, device, budget, rows)
    process = context.Process(target=_serve, args=(made, sending, os.getpid()))
    process.start()
    sending.close()
    assert process.pid is not None
    try:
        is_over = False
        while not is_over:
            ready = wait([receiving, process.sentinel], timeout=budget.left + grace_s)
            row = _received(receiving) if receiving in ready else None
            if row is not None:
                yield row
            elif not ready:
                yield _cut_off(section)
            is_over = row is None
        process.join(grace_s)
        if process.exitcode not in (0, None):
            yield GpuRow.failed(section.name, f"its process ended with {process.exitcode}")
    finally:
        _end_group(process.pid)
        process.kill()
        process.join()
        receiving.close()


def section_rows(
    section: Section, device: torch.device, budget: Budget, rows: Sequence[GpuRow] = ()
) -> Iterator[GpuRow]:
    """A section's rows, and a last one if it raised."""
    try:
        yield from section.run(device, budget, rows)
    except Exception as error:  # noqa: BLE001  (it is a row of the result)
        traceback.print_exc()
        yield GpuRow.failed(section.name, error)


def end_with_parent(parent: int) -> None:
    """Has the system kill this process as soon as its parent ends, however that ends.

    parent: its id, which the child cannot ask for once it is gone.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _serve(rows: Callable[[], Iterator[GpuRow]], sending: Connection, parent: int) -> None:
    # What ends the parent in an orderly way must end this at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A group of its own: what the section starts ends with it. In the parent's session: whoever ends that one
    # finds this too.
    os.setpgid(0, 0)
    end_with_parent(parent)
    for row in rows():
        sending.send_bytes(json.dumps(asdict(row)).encode())
    sys.stdout.flush()


def _received(receiving: Connection) -> GpuRow | None:
    try:
        return GpuRow(**json.loads(receiving.recv_bytes()))
    except EOFError:
        return None


def _cut_off(section: Section) -> GpuRow:
    words = "did not end in its time"
    if section.is_optional:
        return GpuRow.not_run(section.name, words)
    return GpuRow.failed(section.name, words)


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        # Everything in it has ended, or its first process has not made it yet.
        return
