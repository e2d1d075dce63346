"""`python -m decode_worker`: runs one decode worker in this process until SIGTERM, without Ray."""

from __future__ import annotations

import os
import sys
from functools import partial

from baton.config import load_config
from baton.logs import configure_logging
from baton.metrics import configure_metrics, shutdown_metrics
from baton.process import leave, report_errors, run
from baton.telemetry import configure_tracing, shutdown_tracing
from decode_worker.config import DecodeConfig
from decode_worker.serve import serve


def main() -> int:
    """Entry point."""
    config = load_config(DecodeConfig, section="decode", argv=sys.argv[1:], environ=os.environ)
    configure_logging(config.name, config.log_level, config.log_file or None)
    configure_tracing("baton-decode", config.name, config.trace_file or None)
    configure_metrics("baton-decode", config.name)
    try:
        return run(partial(serve, config))
    finally:
        shutdown_tracing()
        shutdown_metrics()


if __name__ == "__main__":
    leave(report_errors(main))
