"""Where measurements of kernels are kept: one file for each environment, shared by processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baton.logs import get_logger
from engine.kernels.environment import Environment
from engine.kernels.measurements import Measurements
from engine.private_folder import make_private

log = get_logger(__name__)


class MeasurementStore:
    """The file of one environment. folder: exists, and only this user writes to it; see open()."""

    def __init__(self, folder: Path, environment: Environment) -> None:
        self.path = folder / environment.file_name
        self._environment = asdict(environment)

    @classmethod
    def open(cls, folder: Path, environment: Environment) -> MeasurementStore | None:
        """Makes the folder. None, with a warning, where nothing can be kept."""
        try:
            make_private(folder)
        except OSError as error:
            log.warning("measurements of kernels are not kept", reason=str(error))
            return None
        return cls(folder, environment)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """No other process measures meanwhile: it would be in the way, and then finds what this one wrote.

        The system lets go of the lock when its holder dies.
        """
        with contextlib.ExitStack() as held:
            try:
                descriptor = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
                held.callback(os.close, descriptor)
                _lock(descriptor)
            except OSError as error:
                log.warning("another process may measure kernels at the same time", reason=str(error))
            yield

    def read(self) -> Measurements:
        """What is known; nothing, with a warning, if the file is damaged or another environment's."""
        try:
            content = json.loads(self.path.read_bytes())
            if content["environment"] != self._environment:
                raise ValueError("it was written for another environment")
            return Measurements.from_json(content)
        except FileNotFoundError:
            return Measurements()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("kernels are measured anew", file=str(self.path), reason=str(error))
            return Measurements()

    def content(self, measurements: Measurements) -> dict[str, Any]:
        """What the file says."""
        return {"environment": self._environment, **measurements.to_json()}

    def write(self, measurements: Measurements) -> None:
        """Replaces the file at once, or, with a warning, not at all."""
        partial = self.path.with_suffix(".part")
        try:
            partial.write_text(json.dumps(self.content(measurements), indent=1), encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            log.warning("measurements of kernels are not kept", reason=str(error))


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("waiting for another process that measures kernels")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
