"""What Ray reads from the environment when it is imported. It must not import Ray itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from baton.pool.config import PoolConfig

LOOPBACK_PREFIXES: Final = ("127.", "localhost:", "[::1]:")
# How long this process, and a local Ray, wait for a control service that is away before they end. The
# workers do not need it; with Ray's own 60 s a longer outage would take them along.
RECONNECT_S: Final = 600
START_S: Final = 90


def prepare_environment(config: PoolConfig) -> None:
    """Sets what Ray reads at import, here and in its processes; what the user has set stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray runs its workers at nice 15. On shared cores prefill would then take the cores from decode,
    # which is the opposite of what the split is for.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_S))
    if not config.ray_address:
        # Ray gives its control service 30 s to start, which a cold disk beside a busy start can take.
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(START_S))
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
