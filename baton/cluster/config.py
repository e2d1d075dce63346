"""Settings of a whole cluster on one machine, and the one rule that shares its cores.

Read by `baton up` and by tests. Knows no process and no role's own settings.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from baton.errors import ConfigError
from baton.tls import TlsFiles

DEFAULT_MODEL = "smollm2-135m-instruct"
PLACEMENTS = ("auto", "disaggregated", "colocated")
KV_TRANSPORTS = ("auto", "shm", "nixl", "grpc")
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Settings of a local cluster: [cluster] in the file, BATON_CLUSTER_* in the environment.

    None leaves a setting to the tables and variables of the roles themselves.
    """

    prefill: int | None = field(
        default=None, metadata={"help": "prefill workers to run; unset: 1, or 0 where colocated"}
    )
    decode: int = field(default=1, metadata={"help": "decode workers to run"})
    model: str = field(
        default=DEFAULT_MODEL, metadata={"help": "model folder, or the name of a pulled model"}
    )
    threads: int | None = field(
        default=None,
        metadata={"help": "threads of each worker; unset: usable cores // workers, at least 1"},
    )
    dtype: str | None = field(default=None, metadata={"help": "auto, bfloat16, float16 or float32"})
    kv_cache_bytes: int | None = field(default=None, metadata={"help": "KV cache of each worker, in bytes"})
    kv_memory_fraction: float = field(
        default=0.1,
        metadata={
            "help": "share of the free memory for all KV caches together, unless their bytes are given"
        },
    )
    placement: str | None = field(
        default=None,
        metadata={"help": "auto, disaggregated or colocated: who computes prompts; unset: auto"},
    )
    kv_transport: str | None = field(
        default=None, metadata={"help": "auto, shm, nixl or grpc: how KV travels between workers"}
    )
    port: int = field(default=50051, metadata={"help": "the router's public port; 0 picks a free one"})
    admin_port: int = field(default=50052, metadata={"help": "the router's admin port; 0 picks a free one"})
    dashboard_port: int = field(
        default=8265, metadata={"help": "port of the local Ray's dashboard; 0 picks a free one"}
    )
    redis_url: str = field(
        default="", repr=False, metadata={"help": "your own Redis; empty starts an embedded one"}
    )
    namespace: str = field(default="baton", metadata={"help": "prefix of this cluster's keys in Redis"})
    tls_cert: str = field(default="", metadata={"help": "PEM file: certificate of all roles, for TLS"})
    tls_key: str = field(default="", metadata={"help": "PEM file: private key of tls_cert"})
    tls_ca: str = field(default="", metadata={"help": "PEM file: authorities that sign peers' certificates"})
    tls_server_name: str = field(
        default="", metadata={"help": "name in that certificate; empty if it names 127.0.0.1"}
    )
    ray: bool = field(
        default=True, metadata={"help": "decode workers are Ray actors; otherwise plain processes"}
    )
    ray_address: str = field(
        default="", metadata={"help": "Ray cluster to use; empty starts one on this machine"}
    )
    trace_file: str = field(default="", metadata={"help": "every process appends its spans here"})
    log_dir: str = field(default="", metadata={"help": "folder of the logs; empty makes one per run"})
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})
    start_timeout_s: float = field(default=120.0, metadata={"help": "longest wait for all workers"})
    drain_s: float = field(default=5.0, metadata={"help": "grace for running requests at the end"})

    def __post_init__(self) -> None:
        TlsFiles.of(self)
        if self.placement is not None and self.placement not in PLACEMENTS:
            raise ConfigError(
                f"placement is {self.placement!r}; it must be one of {', '.join(PLACEMENTS)}",
                field="placement",
            )
        _require_at_least("prefill", self.num_prefill, 0 if self.placement == "colocated" else 1)
        _require_at_least("decode", self.decode, 1)
        for name in ("threads", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                _require_at_least(name, getattr(self, name), 1)
        if not 0 < self.kv_memory_fraction <= 1:
            raise ConfigError(
                f"kv_memory_fraction is {self.kv_memory_fraction}; it must be above 0 and at most 1",
                field="kv_memory_fraction",
            )
        for name in ("port", "admin_port", "dashboard_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 to 65535", field=name)
        if self.port == self.admin_port != 0:
            raise ConfigError(
                f"admin_port is {self.admin_port}, which is port too; choose another", field="admin_port"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(
                f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}", field="dtype"
            )
        if self.kv_transport is not None and self.kv_transport not in KV_TRANSPORTS:
            raise ConfigError(
                f"kv_transport is {self.kv_transport!r}; it must be one of {', '.join(KV_TRANSPORTS)}",
                field="kv_transport",
            )
        if self.ray_address and not self.ray:
            raise ConfigError("ray_address is set but ray is off; drop one of them", field="ray_address")
        if self.start_timeout_s <= 0:
            raise ConfigError(
                f"start_timeout_s is {self.start_timeout_s}; it must be positive", field="start_timeout_s"
            )

    @property
    def tls(self) -> TlsFiles:
        """The files of TLS, for every role and for whoever asks them."""
        return TlsFiles.of(self)

    @property
    def num_threads(self) -> int:
        """Threads of each worker: as set, else the usable cores shared equally, at least one each."""
        if self.threads is not None:
            return self.threads
        return max(1, usable_cores() // self.num_workers)

    @property
    def num_prefill(self) -> int:
        """Prefill workers: as set, else one, or none where decode workers compute all prompts."""
        if self.prefill is not None:
            return self.prefill
        return 0 if self.placement == "colocated" else 1

    @property
    def num_workers(self) -> int:
        """Workers that share this machine."""
        return self.num_prefill + self.decode

    @property
    def has_local_ray(self) -> bool:
        """Whether this cluster starts a Ray of its own."""
        return self.ray and not self.ray_address

    @property
    def worker_names(self) -> frozenset[str]:
        """The workers that must be ready before the cluster is."""
        prefill = {f"prefill-{index}" for index in range(self.num_prefill)}
        return frozenset(prefill | {f"decode-{index}" for index in range(self.decode)})


def usable_cores() -> int:
    """Cores this process may run on; a container or taskset may leave fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}; it must be at least {least}", field=name)
