"""`python -m prefill_worker`: runs one prefill worker in this process until SIGTERM."""

from __future__ import annotations

import os
import sys
from functools import partial

from baton.config import load_config
from baton.logs import configure_logging
from baton.metrics import configure_metrics, shutdown_metrics
from baton.process import leave, report_errors, run
from baton.telemetry import configure_tracing, shutdown_tracing
from prefill_worker.config import PrefillConfig
from prefill_worker.serve import serve


def main() -> int:
    """Entry point."""
    config = load_config(PrefillConfig, section="prefill", argv=sys.argv[1:], environ=os.environ)
    configure_logging(config.name, config.log_level, config.log_file or None)
    configure_tracing("baton-prefill", config.name, config.trace_file or None)
    configure_metrics("baton-prefill", config.name)
    try:
        return run(partial(serve, config))
    finally:
        shutdown_tracing()
        shutdown_metrics()


if __name__ == "__main__":
    leave(report_errors(main))
