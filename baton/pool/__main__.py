"""`python -m baton.pool`: runs workers as Ray actors until SIGTERM.

With follow_config the process begins anew when its settings file changes: the workers go on, and are replaced
one after the other where their settings differ.
"""

from __future__ import annotations

import os
import sys
from functools import partial

from baton.config import load_config
from baton.logs import configure_logging
from baton.pool.config import PoolConfig
from baton.pool.environment import prepare_environment
from baton.process import leave, report_errors, run


def main() -> int:
    """Entry point."""
    config = load_config(PoolConfig, section="pool", argv=sys.argv[1:], environ=os.environ)
    configure_logging("pool", config.log_level)
    prepare_environment(config)
    # Ray reads its environment when it is imported, and so do the roles' actors.
    from baton.pool.config_watch import ConfigWatch  # noqa: PLC0415
    from baton.pool.serve import pool_classes, serve  # noqa: PLC0415

    classes = pool_classes(config)
    watch = ConfigWatch.of(config, classes, sys.argv[1:], os.environ)
    status = run(partial(serve, config, classes, dict(os.environ), watch=watch))
    if status == 0 and watch is not None and watch.has_changed:
        watch.begin_anew("baton.pool")
    return status


if __name__ == "__main__":
    leave(report_errors(main))
