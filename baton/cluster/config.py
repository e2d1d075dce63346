"""Settings of a whole cluster on one machine, and the one rule that shares its cores.

Read by `baton up` and by tests. Knows no process and no role's own settings.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from baton.cluster.defaults import DEFAULT_MODEL, MAX_WORKERS
from baton.drain import check_drain
from baton.errors import ConfigError
from baton.tls import TlsFiles

PLACEMENTS = ("auto", "disaggregated", "colocated")
KV_TRANSPORTS = ("auto", "shm", "nixl", "grpc")
DTYPES = ("auto", "bfloat16", "float16", "float32")
PREFILL_RUNNERS = ("process", "ray")
# Ports of one router lie this far from those of the one before.
ROUTER_STEP = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Settings of a local cluster: [cluster] in the file, BATON_CLUSTER_* in the environment.

    None leaves a setting to the tables and variables of the roles themselves.
    """

    prefill: int | None = field(
        default=None,
        metadata={
            "help": f"prefill workers to run, up to {MAX_WORKERS}; unset: 1, or 0 where colocated",
        },
    )
    decode: int = field(default=1, metadata={"help": f"decode workers to run, 1 to {MAX_WORKERS}"})
    routers: int = field(default=1, metadata={"help": "routers to run; a client may use any of them"})
    model: str = field(
        default=DEFAULT_MODEL, metadata={"help": "model folder, or the name of a pulled model"}
    )
    threads: int | None = field(
        default=None,
        metadata={"help": "threads of each worker; unset: usable cores // workers, at least 1"},
    )
    dtype: str | None = field(default=None, metadata={"help": "auto, bfloat16, float16 or float32"})
    prefill_kv_dtype: str | None = field(
        default=None, metadata={"help": "KV cache of prefill workers: as dtype; auto is that of the weights"}
    )
    decode_kv_dtype: str | None = field(
        default=None, metadata={"help": "KV cache of decode workers: as dtype; auto is that of the weights"}
    )
    compile: bool | None = field(
        default=None, metadata={"help": "workers compile their layers before they serve"}
    )
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
    port: int = field(
        default=50051,
        metadata={
            "help": "public port of router-0; each further one's is 10 above the one's before; 0 picks free"
        },
    )
    http_port: int = field(default=8000, metadata={"help": "HTTP ports, in the same way"})
    admin_port: int = field(default=50052, metadata={"help": "admin ports, in the same way"})
    control_port: int = field(
        default=50053, metadata={"help": "port of `baton scale` and the like; 0 picks a free one"}
    )
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
    prefill_on: str = field(
        default="process",
        metadata={"help": "process or ray: whether prefill workers are plain processes or Ray actors too"},
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
        _require_choice("placement", self.placement, PLACEMENTS)
        for name in ("dtype", "prefill_kv_dtype", "decode_kv_dtype"):
            _require_choice(name, getattr(self, name), DTYPES)
        _require_choice("kv_transport", self.kv_transport, KV_TRANSPORTS)
        _require_choice("prefill_on", self.prefill_on, PREFILL_RUNNERS)
        _require_workers("prefill", self.num_prefill, 0 if self.placement == "colocated" else 1)
        _require_workers("decode", self.decode, 1)
        _require_at_least("routers", self.routers, 1)
        for name in ("threads", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                _require_at_least(name, getattr(self, name), 1)
        if not 0 < self.kv_memory_fraction <= 1:
            raise ConfigError(
                f"kv_memory_fraction is {self.kv_memory_fraction}; it must be above 0 and at most 1",
                field="kv_memory_fraction",
            )
        self._check_ports()
        for name in ("ray_address", "prefill_on"):
            if getattr(self, name) not in ("", "process") and not self.ray:
                raise ConfigError(f"{name} is set but ray is off; drop one of them", field=name)
        check_drain(self.drain_s)
        if self.start_timeout_s <= 0:
            raise ConfigError(
                f"start_timeout_s is {self.start_timeout_s}; it must be positive", field="start_timeout_s"
            )

    def _check_ports(self) -> None:
        taken: dict[int, str] = {}
        for name in ("port", "http_port", "admin_port", "control_port", "dashboard_port"):
            first = getattr(self, name)
            is_per_router = name in ("port", "http_port", "admin_port")
            ports = self.ports_from(first) if is_per_router else [first]
            if not 0 <= first <= max(ports) <= 65535:
                whose = f" of {self.routers} routers" if is_per_router and self.routers > 1 else ""
                raise ConfigError(f"{name} is {first}{whose}; it must be 0 to 65535", field=name)
            for port in ports if first else []:
                if port in taken and (name != "dashboard_port" or self.has_local_ray):
                    raise ConfigError(f"{name} {port} is {taken[port]} too; choose another", field=name)
                taken[port] = name

    def ports_from(self, first: int) -> list[int]:
        """A port per router: the first and those after it; all 0, to be picked, where the first is."""
        return [first + ROUTER_STEP * index if first else 0 for index in range(self.routers)]

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
    def router_names(self) -> list[str]:
        """The routers, in order."""
        return [f"router-{index}" for index in range(self.routers)]

    def kv_dtype(self, role: str) -> str | None:
        """Of the KV caches of that role, "prefill" or "decode"; None leaves it to the role."""
        return self.prefill_kv_dtype if role == "prefill" else self.decode_kv_dtype

    def is_on_ray(self, role: str) -> bool:
        """Whether the workers of that role, "prefill" or "decode", are Ray actors."""
        return self.ray and (role == "decode" or self.prefill_on == "ray")

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


def _require_workers(name: str, value: int, least: int) -> None:
    if not least <= value <= MAX_WORKERS:
        raise ConfigError(f"{name} is {value}; it must be {least} to {MAX_WORKERS}", field=name)


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}; it must be at least {least}", field=name)


def _require_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}", field=name)
