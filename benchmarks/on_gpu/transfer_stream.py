"""The two ends of a transfer over a device's memory, also where the device is a CPU.

There the reader and the writer that GPUs have work on the CPU's memory, with interpreted kernels. What they
launch has happened when that returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.runner import ModelRunner
from kvtransfer.device_writer import DeviceWriter
from kvtransfer.side_stream import Stream
from kvtransfer.staged import StagedReader

if TYPE_CHECKING:
    import torch


class AtOnce:
    """A Stream where there is none."""

    @contextmanager
    def behind(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """As Stream.behind()."""
        assert event is None, "a CPU has no events"
        yield


def device_reader(runner: ModelRunner, max_frame_bytes: int) -> StagedReader:
    """Reads frames as on a GPU."""
    return StagedReader(runner.cache, max_frame_bytes, runner.kernel_choices, stream=_stream(runner))


def device_writer(runner: ModelRunner) -> DeviceWriter:
    """Writes frames as on a GPU."""
    return DeviceWriter(runner.cache, runner.kernel_choices, stream=_stream(runner))


def _stream(runner: ModelRunner) -> Stream | None:
    return AtOnce() if runner.cache.device.type == "cpu" else None
