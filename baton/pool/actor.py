"""A worker as an actor: what both roles have in common. Ray places it, and is never on the token path."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from ray.util import get_node_ip_address

from baton import __version__
from baton.logs import configure_logging
from baton.metrics import configure_metrics
from baton.pool.serving_thread import ServingThread
from baton.served_role import ServedRole
from baton.telemetry import configure_tracing

WAIT_ENDED_S: Final = 2.0


class WorkerActor:
    """Runs one worker for as long as the actor lives; it serves when the constructor returns.

    settings: fields of the role's config; `{ip}` in host stands for the address of the node.
    digest: of the settings, for a later pool to compare.
    place: what was reserved for the actor, for a later pool to free.

    Methods are called from Ray's threads. They take and give plain values only, so that a pool of another
    version understands them. None may be a coroutine: Ray would then run all of them on one event loop.
    """

    role: ClassVar[ServedRole]

    def __init__(self, settings: Mapping[str, Any], digest: str, place: Mapping[str, str]) -> None:
        self._name = str(settings["name"])
        self._digest = digest
        self._place = dict(place)
        config = self.role.config_class(**{**settings, "host": _here(str(settings["host"]))})
        configure_logging(self._name, config.log_level, config.log_file or None)
        configure_tracing(f"baton-{self.role.name}", self._name, config.trace_file or None)
        configure_metrics(f"baton-{self.role.name}", self._name)
        self._thread = ServingThread(self.role, config)
        if threading.current_thread() is threading.main_thread():
            # Ray's own handler would end the process without a drain.
            signal.signal(signal.SIGTERM, lambda _number, _frame: self._leave_on_signal())
        self._served = self._thread.start()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}, {self.role.name})"

    def facts(self) -> dict[str, Any]:
        """What does not change while it lives."""
        return {
            "name": self._name,
            "pid": os.getpid(),
            "address": self._served.address,
            "digest": self._digest,
            "place": self._place,
            "release": __version__,
        }

    def look(self) -> dict[str, Any]:
        """How the worker is and how busy: health, load and is_draining."""
        return self._thread.look()

    def drain(self) -> None:
        """Tells the worker to drain and leave; wait_ended() says whether it has."""
        self._thread.leave()

    def wait_ended(self) -> bool:
        """Whether the worker has drained and left, some moments before the process ends.

        Waits for it, but not for long: Ray lets a call go on whose pool is gone, and threads are few.
        """
        return self._thread.wait_ended(WAIT_ENDED_S)

    def _leave_on_signal(self) -> None:
        if self._thread.is_leaving:
            # Whoever asks twice does not want to wait.
            os._exit(1)
        self._thread.leave()


def _here(host: str) -> str:
    """host, with {ip} replaced by the address of the node that the actor was placed on."""
    return host.replace("{ip}", get_node_ip_address()) if "{ip}" in host else host
