"""Where one run of a cluster lives: its ports, its folders, its Redis."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from baton.cache import cache_dir
from baton.cluster.config import ClusterConfig
from baton.cluster.free_ports import LOOPBACK, claim
from baton.cluster.role_settings import RoleSettings
from baton.errors import ConfigError

_NUM_KEPT_RUNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Claimed ports; none is 0, except that of the dashboard where there is no local Ray.

    public, http, admin: by router.
    """

    public: Mapping[str, int]
    http: Mapping[str, int]
    admin: Mapping[str, int]
    control: int
    dashboard: int

    @classmethod
    def claim(cls, config: ClusterConfig) -> Ports:
        """Looks for all of them; raises ConfigError if one is taken."""
        return cls(
            public=_claim_all(config, "port"),
            http=_claim_all(config, "http_port"),
            admin=_claim_all(config, "admin_port"),
            control=claim(config.control_port, "control_port"),
            dashboard=claim(config.dashboard_port, "dashboard_port") if config.has_local_ray else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where this run of a cluster lives.

    redis_url: with its password.  logs: folder of the log files.
    ready_file: the pool writes its facts here.  ray_dir: Ray's own folder; its path must be short.
    config_file: TOML file that the roles read as well, or "".
    role_settings: what the user has set for the roles themselves.
    """

    ports: Ports
    redis_url: str = field(repr=False)
    logs: Path
    ready_file: Path
    ray_dir: Path
    config_file: str = ""
    role_settings: RoleSettings = field(repr=False)

    @classmethod
    def make(
        cls, ports: Ports, redis_url: str, *, logs: Path, config_file: str, role_settings: RoleSettings
    ) -> Places:
        """Makes ray_dir, which the caller removes."""
        # Ray puts sockets into its folder, and a socket's path is limited to 107 bytes.
        ray_dir = Path(tempfile.mkdtemp(prefix="baton-", dir="/tmp" if Path("/tmp").is_dir() else None))
        return cls(
            ports=ports,
            redis_url=redis_url,
            logs=logs,
            ready_file=ray_dir / "pool.json",
            ray_dir=ray_dir,
            config_file=str(Path(config_file).absolute()) if config_file else "",
            role_settings=role_settings,
        )

    @property
    def addresses(self) -> dict[str, str]:
        """Where clients connect, host:port by router."""
        return {name: f"{LOOPBACK}:{port}" for name, port in self.ports.public.items()}

    @property
    def http_addresses(self) -> dict[str, str]:
        """The routers' HTTP ports, host:port by router."""
        return {name: f"{LOOPBACK}:{port}" for name, port in self.ports.http.items()}

    @property
    def admin_addresses(self) -> dict[str, str]:
        """The routers' admin ports, host:port by router."""
        return {name: f"{LOOPBACK}:{port}" for name, port in self.ports.admin.items()}

    @property
    def dashboard_url(self) -> str:
        """Where a local Ray shows itself."""
        return f"http://{LOOPBACK}:{self.ports.dashboard}"

    @property
    def shm_folders(self) -> set[Path]:
        """Where workers keep shared memory."""
        roles = ("prefill", "decode")
        return {Path(self.role_settings.text(role, "shm_folder", "/dev/shm")) for role in roles}


def make_logs(config: ClusterConfig) -> Path:
    """Makes the folder of the logs: log_dir, or one for this run; raises ConfigError if that fails."""
    logs = Path(config.log_dir).absolute() if config.log_dir else _new_run_folder(cache_dir() / "run")
    try:
        # What a log tells is its owner's.
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"log_dir {logs} cannot be made: {error.strerror}", field="log_dir") from error
    return logs


def _claim_all(config: ClusterConfig, setting: str) -> dict[str, int]:
    wanted = config.ports_from(getattr(config, setting))
    return {name: claim(port, setting) for name, port in zip(config.router_names, wanted, strict=True)}


def _new_run_folder(runs: Path) -> Path:
    """A new folder for this run; those of runs that have ended are removed, but for the last few."""
    runs.mkdir(parents=True, exist_ok=True)
    for old in sorted(path for path in runs.iterdir() if path.is_dir())[: -_NUM_KEPT_RUNS + 1]:
        if not _runs(old):
            shutil.rmtree(old, ignore_errors=True)
    folder = runs / f"{datetime.now(tz=UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _runs(folder: Path) -> bool:
    """Whether the process that its name ends with lives: its roles are started again with what lies there."""
    pid = folder.name.rpartition("-")[2]
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
