"""A role as it is run, the same in a process of its own and inside an actor; and its process.

Knows no engine, no model and no Ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.config import load_config
from baton.logs import configure_logging
from baton.metrics import configure_metrics, shutdown_metrics
from baton.process import run
from baton.telemetry import configure_tracing, shutdown_tracing


@dataclass(frozen=True, slots=True)
class ServedRole:
    """What a worker runs.

    name: "prefill" or "decode", which is also the section of its settings.
    config_class: the dataclass of its settings.
    serve: takes (config, stop, on_serving=...) and serves until stop is set.
    """

    name: str
    config_class: type[Any]
    serve: Callable[..., Awaitable[None]]

    def main(self) -> int:
        """Runs it in this process until SIGTERM, and returns the exit status.

        Raises ConfigError if a setting is wrong.
        """
        config = load_config(self.config_class, section=self.name, argv=sys.argv[1:], environ=os.environ)
        configure_logging(config.name, config.log_level, config.log_file or None)
        configure_tracing(f"baton-{self.name}", config.name, config.trace_file or None)
        configure_metrics(f"baton-{self.name}", config.name)
        try:
            return run(partial(self.serve, config))
        finally:
            shutdown_tracing()
            shutdown_metrics()
