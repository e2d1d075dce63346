"""`python -m decode_worker.pool_main`: runs a pool of decode workers on Ray until SIGTERM."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from pathlib import Path

from baton.config import load_config
from baton.logs import configure_logging, get_logger
from baton.process import report_errors, run, run_until, stop_on_signals, write_ready_file
from decode_worker.pool_config import PoolConfig

log = get_logger(__name__)

LOOPBACK_PREFIXES = ("127.", "localhost:", "[::1]:")


async def serve(config: PoolConfig, stop: asyncio.Event) -> None:
    """Places the workers and keeps them until stop is set, or until Ray cannot."""
    # Ray reads its environment when it is imported.
    from decode_worker.pool import DecodePool  # noqa: PLC0415

    starting = asyncio.ensure_future(DecodePool.start(config))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done() and not config.ray_address:
        # Ray's start cannot be interrupted. Its processes are bound to this one and end with it.
        log.info("stopped while Ray was starting")
        os._exit(0)
    pool = await starting
    stopped.cancel()
    # Ray's core has installed a handler of its own, which would end this process without a drain.
    stop_on_signals(stop)
    write_ready_file(config.ready_file, dashboard_url=pool.dashboard_url, pid=os.getpid())
    try:
        await run_until(stop, pool.watch())
    finally:
        await pool.close()


def prepare_environment(config: PoolConfig) -> None:
    """Sets what Ray reads at import, here and in its processes."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray runs its workers at nice 15. On shared cores prefill would then take the cores from decode,
    # which is the opposite of what the split is for.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if config.ray_dir:
        # Python's own temporary files of Ray's processes go where the run's others go, and end with them.
        os.environ["TMPDIR"] = config.ray_dir
    if not config.ray_address or config.ray_address.startswith(LOOPBACK_PREFIXES):
        # Despite its name this works on Linux too: Ray then takes 127.0.0.1 for a node's address and
        # listens there only. Otherwise it replaces 127.0.0.1 and listens on all interfaces.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if not config.ray_address or _has_ray_token():
        # A local Ray makes a token if there is none; newer versions ask for one by themselves. `ray start`
        # does so too; whoever joins such a cluster has to ask for it.
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _has_ray_token() -> bool:
    names = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    return any(os.environ.get(name) for name in names) or (Path.home() / ".ray" / "auth_token").is_file()


def main() -> int:
    """Entry point."""
    config = load_config(PoolConfig, section="decode", argv=sys.argv[1:], environ=os.environ)
    configure_logging("decode-pool", config.log_level)
    prepare_environment(config)
    return run(partial(serve, config))


if __name__ == "__main__":
    sys.exit(report_errors(main))
