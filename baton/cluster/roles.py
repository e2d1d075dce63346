"""The command lines of a cluster's roles.

Turns a ClusterConfig into what is to be run. Roles are named by module: none of
them is imported here, and no password reaches a command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.cluster.config import ClusterConfig
from baton.cluster.role_process import RoleSpec
from baton.tls import TLS_SETTINGS

ROUTER = "router-0"
POOL = "decode-pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where this run of a cluster lives.

    port, admin_port, dashboard_port: claimed; none is 0.
    redis_url: with its password.  logs: folder of the log files.
    ready_file: the pool writes its facts here.  ray_dir: Ray's own folder; its path must be short.
    config_file: TOML file that the roles read as well, or "".
    """

    port: int
    admin_port: int
    dashboard_port: int
    redis_url: str = field(repr=False)
    logs: Path
    ready_file: Path
    ray_dir: Path
    config_file: str = ""

    @property
    def dashboard_url(self) -> str:
        """Where a local Ray shows itself."""
        return f"http://127.0.0.1:{self.dashboard_port}"


def router_spec(config: ClusterConfig, places: Places) -> RoleSpec:
    """The router. Without a Ray of our own it cannot know the dashboard's address."""
    flags = {
        **_shared_flags(config),
        "name": ROUTER,
        "port": places.port,
        "admin_port": places.admin_port,
        "dashboard_url": places.dashboard_url if config.has_local_ray else "",
    }
    if config.placement is not None:
        flags["placement"] = config.placement
    environment = _environment(places, "router")
    return RoleSpec(name=ROUTER, role="router", command=_command("router", flags), environment=environment)


def prefill_specs(config: ClusterConfig, places: Places) -> list[RoleSpec]:
    """The prefill workers, prefill-0 onwards."""
    return [
        _worker_spec(config, places, role="prefill", name=f"prefill-{index}")
        for index in range(config.num_prefill)
    ]


def decode_specs(config: ClusterConfig, places: Places) -> list[RoleSpec]:
    """The decode side: one pool that places actors on Ray, or plain workers without Ray."""
    names = [f"decode-{index}" for index in range(config.decode)]
    if not config.ray:
        return [_worker_spec(config, places, role="decode", name=name) for name in names]
    flags = {
        **_engine_flags(config),
        "workers": config.decode,
        "ray_address": config.ray_address,
        "ray_dir": places.ray_dir if config.has_local_ray else "",
        "dashboard_port": places.dashboard_port,
        # Actors on other machines do not have this folder; Ray keeps their logs then.
        "log_dir": places.logs if config.has_local_ray else "",
        "ready_file": places.ready_file,
    }
    return [
        RoleSpec(
            name=POOL,
            role="decode",
            command=_command("decode_worker.pool_main", flags),
            environment=_environment(places, "decode"),
            logs=tuple(places.logs / f"{name}.log" for name in names) if config.has_local_ray else (),
        )
    ]


def _worker_spec(config: ClusterConfig, places: Places, *, role: str, name: str) -> RoleSpec:
    flags = {**_engine_flags(config), "name": name, "port": 0}
    if role == "prefill" and config.kv_transport is not None:
        flags["kv_transport"] = config.kv_transport
    return RoleSpec(
        name=name,
        role=role,
        command=_command(f"{role}_worker", flags),
        environment=_environment(places, role),
    )


def _shared_flags(config: ClusterConfig) -> dict[str, object]:
    # What is not set is not passed on: a role that sets it for itself must not fall back to plain text.
    tls = {name: getattr(config, name) for name in TLS_SETTINGS if getattr(config, name)}
    return {
        **tls,
        "model": config.model,
        "namespace": config.namespace,
        "trace_file": config.trace_file,
        "log_level": config.log_level,
        "drain_s": config.drain_s,
    }


def _engine_flags(config: ClusterConfig) -> dict[str, object]:
    optional = {"dtype": config.dtype, "kv_cache_bytes": config.kv_cache_bytes}
    given = {name: value for name, value in optional.items() if value is not None}
    # All workers share one memory, as they share the cores.
    fraction = config.kv_memory_fraction / config.num_workers
    return {**_shared_flags(config), "threads": config.num_threads, "kv_memory_fraction": fraction, **given}


def _environment(places: Places, section: str) -> dict[str, str]:
    environment = {f"BATON_{section.upper()}_REDIS_URL": places.redis_url}
    return environment | ({"BATON_CONFIG": places.config_file} if places.config_file else {})


def _command(module: str, flags: Mapping[str, object]) -> tuple[str, ...]:
    return ("-m", module, *(f"--{key.replace('_', '-')}={value}" for key, value in flags.items()))
