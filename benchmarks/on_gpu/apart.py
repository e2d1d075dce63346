"""Runs a section of `benchmarks.gpu` in a process of its own.

A kernel that reads where it must not ruins its process's GPU for everything after it, and one that never ends
cannot be stopped: both cost their section, and nothing else. What a section allocates is gone with it.

Forked, which takes no second import of torch: so the parent must never touch a GPU, nor compute with torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from benchmarks.on_gpu.section import Budget, GpuRow, Section

if TYPE_CHECKING:
    import torch

# For a section to notice that its time is over.
_GRACE_S = 5.0


def rows_apart(
    section: Section, device: torch.device, budget: Budget, *, grace_s: float = _GRACE_S
) -> Iterator[GpuRow]:
    """A section's rows as they come, and a last one if it raised, crashed, or had to be killed."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(section, device, budget, sending))
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
        _end(process.pid)
        process.join()
        receiving.close()


def section_rows(section: Section, device: torch.device, budget: Budget) -> Iterator[GpuRow]:
    """A section's rows, and a last one if it raised."""
    try:
        yield from section.run(device, budget)
    except Exception as error:  # noqa: BLE001  (it is a row of the result)
        traceback.print_exc()
        yield GpuRow.failed(section.name, error)


def _serve(section: Section, device: torch.device, budget: Budget, sending: Connection) -> None:
    # A group of its own: what the section starts ends with it.
    os.setsid()
    for row in section_rows(section, device, budget):
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


def _end(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        # Everything in it has ended.
        return
