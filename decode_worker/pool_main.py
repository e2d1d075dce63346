"""`python -m decode_worker.pool_main`: runs a pool of decode workers on Ray until SIGTERM."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial

from baton.config import load_config
from baton.logs import configure_logging
from baton.process import run, write_ready_file
from decode_worker.pool import DecodePool
from decode_worker.pool_config import PoolConfig


async def serve(config: PoolConfig, stop: asyncio.Event) -> None:
    """Places the workers and keeps them until stop is set."""
    pool = await DecodePool.start(config)
    try:
        write_ready_file(config.ready_file, dashboard_url=pool.dashboard_url, pid=os.getpid())
        await stop.wait()
    finally:
        await pool.close()


def main() -> int:
    """Entry point."""
    config = load_config(PoolConfig, section="decode", argv=sys.argv[1:], environ=os.environ)
    configure_logging("decode-pool", config.log_level)
    return run(partial(serve, config))


if __name__ == "__main__":
    sys.exit(main())
