"""`python -m tests.idle_pool`: a pool of idle workers in a process of its own, with a real one's settings.

At SIGUSR1 it writes what Ray holds to ray.json in --log-dir:
{"groups": [names], "free": {resource: amount}, "address": "host:port"}.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from baton.config import load_config
from baton.logs import configure_logging
from baton.pool.config import PoolConfig
from baton.pool.environment import prepare_environment
from baton.process import leave, report_errors, run


def main() -> int:
    config = load_config(PoolConfig, section="pool", argv=sys.argv[1:], environ=os.environ)
    configure_logging("pool")
    prepare_environment(config)
    import ray
    from ray.util.placement_group import placement_group_table

    from baton.pool.config_watch import ConfigWatch
    from baton.pool.serve import serve
    from tests.idle_role import IdlePool

    def look() -> dict[str, object]:
        rows = placement_group_table().values()
        groups = sorted(row["name"] for row in rows if row["state"] != "REMOVED")
        address = ray.get_runtime_context().gcs_address
        return {"groups": groups, "free": ray.available_resources(), "address": address}

    async def tell() -> None:
        partial = Path(config.log_dir) / "ray.part"
        partial.write_text(json.dumps(await asyncio.to_thread(look)))
        partial.replace(Path(config.log_dir) / "ray.json")

    async def role(stop: asyncio.Event) -> None:
        telling: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: telling.add(loop.create_task(tell())))
        await serve(config, {"decode": IdlePool}, os.environ, stop, watch)

    watch = ConfigWatch.of(config, {"decode": IdlePool}, sys.argv[1:], os.environ)
    status = run(role)
    if status == 0 and watch is not None and watch.has_changed:
        watch.begin_anew("tests.idle_pool")
    return status


if __name__ == "__main__":
    leave(report_errors(main))
