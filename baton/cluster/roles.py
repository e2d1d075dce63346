"""The command lines of a cluster's roles.

Turns a ClusterConfig into what is to be run. Roles are named by module: none of
them is imported here, and no password reaches a command line.

A plain process gets its settings as flags. The pool's flags are its own; what its workers are to know
travels in the environment, in the variables of their own sections. Either way a setting of the cluster
wins over one of the role, and what the cluster leaves open stays the role's.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.cluster.config import ClusterConfig
from baton.cluster.places import Places
from baton.cluster.role_process import RoleSpec
from baton.tls import TLS_SETTINGS

POOL = "pool"
WORKER_ROLES = ("prefill", "decode")
# A pool kills a worker that does not leave drain_s + 10 s after it was asked to, waits drain_s + 20 s for all
# of them, and 15 s more for Ray's own end. Who kills the pool before that leaves actors behind on a Ray that
# is not its own. So it gets this beyond the drain_s + 10 s of every process.
POOL_EXTRA_GRACE_S = 30.0


def router_specs(config: ClusterConfig, places: Places) -> list[RoleSpec]:
    """The routers. Without a Ray of our own they cannot know the dashboard's address."""
    shared = {
        **_shared_settings(config),
        "dashboard_url": places.dashboard_url if config.has_local_ray else "",
    }
    if config.placement is not None:
        shared["placement"] = config.placement
    return [
        RoleSpec(
            name=name,
            role="router",
            command=_command(
                "router",
                {
                    **shared,
                    "name": name,
                    "port": places.ports.public[name],
                    "http_port": places.ports.http[name],
                    "admin_port": places.ports.admin[name],
                },
            ),
            environment=_environment(places, "router"),
        )
        for name in config.router_names
    ]


def worker_specs(config: ClusterConfig, places: Places) -> list[RoleSpec]:
    """What runs the workers at the start: the pool first, because Ray takes longest, then plain processes."""
    pools = [pool_spec(config, places)] if config.ray else []
    return pools + [
        worker_spec(config, places, role=role, index=index)
        for role in WORKER_ROLES
        if not config.is_on_ray(role)
        for index in range(num_workers(config, role))
    ]


def num_workers(config: ClusterConfig, role: str) -> int:
    """How many workers of a role there are at the start."""
    return config.num_prefill if role == "prefill" else config.decode


def worker_spec(config: ClusterConfig, places: Places, *, role: str, index: int) -> RoleSpec:
    """One worker as a plain process."""
    name = f"{role}-{index}"
    flags = {**_worker_settings(config, places, role), "name": name, "port": 0}
    return RoleSpec(
        name=name,
        role=role,
        command=_command(f"{role}_worker", flags),
        environment=_environment(places, role),
    )


def pool_counts(config: ClusterConfig) -> dict[str, int]:
    """How many workers of each of its roles the pool has at the start."""
    return {role: num_workers(config, role) for role in WORKER_ROLES if config.is_on_ray(role)}


def pool_spec(config: ClusterConfig, places: Places, wanted: Mapping[str, int] | None = None) -> RoleSpec:
    """The pool that places actors on Ray: decode workers, and prefill workers if they are wanted there.

    wanted: workers by role, where that has changed since the start. What each worker gets stays the same.
    """
    counts = pool_counts(config) if wanted is None else wanted
    flags = {
        **_tls_settings(config),
        "namespace": config.namespace,
        "log_level": config.log_level,
        "drain_s": config.drain_s,
        "decode": counts["decode"],
        "prefill": counts.get("prefill", 0),
        "ray_address": config.ray_address,
        "ray_dir": places.ray_dir if config.has_local_ray else "",
        "dashboard_port": places.ports.dashboard,
        # Actors on other machines do not have this folder; Ray keeps their logs then.
        "log_dir": places.logs if config.has_local_ray else "",
        "ready_file": places.ready_file,
        "control_port": 0,
    }
    environment: dict[str, str] = {}
    for role in counts:
        environment |= _environment(places, role)
        settings = _worker_settings(config, places, role)
        environment |= {_variable(role, name): str(value) for name, value in settings.items()}
    names = [f"{role}-{index}" for role, count in counts.items() for index in range(count)]
    return RoleSpec(
        name=POOL,
        role=POOL,
        command=_command("baton.pool", flags),
        environment=environment,
        logs=tuple(places.logs / f"{name}.log" for name in names) if config.has_local_ray else (),
        extra_grace_s=POOL_EXTRA_GRACE_S,
    )


def _worker_settings(config: ClusterConfig, places: Places, role: str) -> dict[str, object]:
    # All workers share one memory, as they share the cores.
    settings: dict[str, object] = {
        **_shared_settings(config),
        "threads": config.num_threads,
        "kv_memory_fraction": config.kv_memory_fraction / config.num_workers,
    }
    if config.threads is None and places.role_settings.has(role, "threads"):
        del settings["threads"]
    optional = {
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype(role),
        "compile": config.compile,
        "kv_cache_bytes": config.kv_cache_bytes,
    }
    if role == "prefill":
        optional["kv_transport"] = config.kv_transport
    return settings | {name: value for name, value in optional.items() if value is not None}


def _shared_settings(config: ClusterConfig) -> dict[str, object]:
    traces = {"trace_file": config.trace_file} if config.trace_file else {}
    return {
        **_tls_settings(config),
        **traces,
        "model": config.model,
        "namespace": config.namespace,
        "log_level": config.log_level,
        "drain_s": config.drain_s,
    }


def _tls_settings(config: ClusterConfig) -> dict[str, object]:
    # What is not set is not passed on: a role that sets it for itself must not fall back to plain text.
    return {name: getattr(config, name) for name in TLS_SETTINGS if getattr(config, name)}


def _environment(places: Places, section: str) -> dict[str, str]:
    environment = {_variable(section, "redis_url"): places.redis_url}
    return environment | ({"BATON_CONFIG": places.config_file} if places.config_file else {})


def _variable(section: str, name: str) -> str:
    return f"BATON_{section.upper()}_{name.upper()}"


def _command(module: str, flags: Mapping[str, object]) -> tuple[str, ...]:
    return ("-m", module, *(_flag(name.replace("_", "-"), value) for name, value in flags.items()))


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"
