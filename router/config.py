"""Settings of a router, parsed once at the entry point."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from baton.errors import ConfigError
from baton.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of one router. Times in seconds; sizes in the unit their name ends with."""

    name: str = field(default="router-0", metadata={"help": "name of this router"})
    model: str = field(metadata={"help": "model folder, or the name of a pulled model"})
    host: str = field(default="127.0.0.1", metadata={"help": "address of the public port"})
    port: int = field(default=50051, metadata={"help": "public gRPC port; 0 picks a free one"})
    # Apart from `host`, so that opening the public port opens nothing else.
    admin_host: str = field(default="127.0.0.1", metadata={"help": "address of the admin port"})
    admin_port: int = field(default=50052, metadata={"help": "admin gRPC port; 0 picks a free one"})
    redis_url: str = field(default="redis://127.0.0.1:6379/0", repr=False, metadata={"help": "registry"})
    namespace: str = field(default="baton", metadata={"help": "prefix of this cluster's keys in Redis"})
    tls_cert: str = field(default="", metadata={"help": "PEM file: this process's certificate, for TLS"})
    tls_key: str = field(default="", metadata={"help": "PEM file: private key of tls_cert"})
    tls_ca: str = field(default="", metadata={"help": "PEM file: authorities that sign peers' certificates"})
    tls_server_name: str = field(
        default="", metadata={"help": "name in every worker's certificate; empty for the host dialled"}
    )
    bucket_edges: tuple[int, ...] = field(
        default=(128, 256, 512), metadata={"help": "length bucket edges, in prompt tokens, ascending"}
    )
    max_queue: int = field(default=256, metadata={"help": "requests that may wait, over all buckets"})
    max_skip_s: float = field(
        default=5.0, metadata={"help": "a request that waited this long is no longer overtaken"}
    )
    reserve_timeout_s: float = field(default=2.0, metadata={"help": "longest wait for a reservation"})
    resume_wait_s: float = field(
        default=1.0, metadata={"help": "how long a request waits for another worker after one died"}
    )
    max_attempts: int = field(
        default=8, metadata={"help": "attempts in a row without committed KV before a request fails"}
    )
    default_max_tokens: int = field(default=128, metadata={"help": "max_tokens of requests that name none"})
    write_timeout_s: float = field(
        default=30.0, metadata={"help": "a client that reads nothing for this long is cut off"}
    )
    drain_s: float = field(default=5.0, metadata={"help": "grace for running requests at shutdown"})
    dashboard_url: str = field(default="", metadata={"help": "address of the Ray dashboard, for status"})
    trace_file: str = field(default="", metadata={"help": "append finished spans here as JSON lines"})
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})
    ready_file: str = field(default="", metadata={"help": "written with the bound addresses once serving"})

    def __post_init__(self) -> None:
        TlsFiles.of(self)
        if not self.bucket_edges or any(a >= b for a, b in pairwise((0, *self.bucket_edges))):
            raise ConfigError(
                f"bucket_edges is {self.bucket_edges}; give positive token counts in ascending order",
                field="bucket_edges",
            )
        for name in ("max_queue", "max_attempts", "default_max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1", field=name)

    @property
    def tls(self) -> TlsFiles:
        """The files of TLS."""
        return TlsFiles.of(self)
