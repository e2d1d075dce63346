"""Settings of a decode worker, parsed once at the entry point."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.advertise import check_advertise
from baton.drain import check_drain
from baton.errors import ConfigError
from baton.tls import TlsFiles
from engine.config import EngineConfig
from kvtransfer.contract import check_checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(EngineConfig):
    """Settings of one decode worker, its engine's included. Times in seconds."""

    name: str = field(default="decode-0", metadata={"help": "name of this worker"})
    model: str = field(metadata={"help": "model folder, or the name of a pulled model"})
    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=0, metadata={"help": "gRPC port; 0 picks a free one"})
    health_port: int | None = field(
        default=None,
        metadata={"help": "plain-text port of the health service alone, for probes; 0 picks a free one"},
    )
    advertise: str = field(
        default="",
        metadata={"help": "host:port to announce, with {port} and {name}; empty for the bound address"},
    )
    redis_url: str = field(default="redis://127.0.0.1:6379/0", repr=False, metadata={"help": "registry"})
    namespace: str = field(default="baton", metadata={"help": "prefix of this cluster's keys in Redis"})
    tls_cert: str = field(default="", metadata={"help": "PEM file: this process's certificate, for TLS"})
    tls_key: str = field(default="", metadata={"help": "PEM file: private key of tls_cert"})
    tls_ca: str = field(default="", metadata={"help": "PEM file: authorities that sign peers' certificates"})
    tls_server_name: str = field(
        default="", metadata={"help": "name in every worker's certificate; empty for the host dialled"}
    )
    lease_ttl_s: float = field(
        default=10.0, metadata={"help": "a lease that no router renews for this long ends"}
    )
    # With its header it fits the 64 MiB of shared memory that containers have by default.
    arena_bytes: int = field(
        default=48 << 20,
        metadata={"help": "memory that KV is written into by shm and nixl; 0 takes KV over gRPC only"},
    )
    shm_folder: str = field(default="/dev/shm", metadata={"help": "folder of shared memory, on this host"})
    kv_checksum: str = field(
        default="xxh3", metadata={"help": "xxh3 or none: digest of KV frames; alike on all workers"}
    )
    drain_s: float = field(
        default=30.0,
        metadata={"help": "time for attempts to end at shutdown; other workers go on with the rest"},
    )
    trace_file: str = field(default="", metadata={"help": "append finished spans here as JSON lines"})
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})
    log_file: str = field(default="", metadata={"help": "append the log here instead of standard error"})
    ready_file: str = field(default="", metadata={"help": "written with the bound address once serving"})

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        check_advertise(self.host, self.advertise)
        check_drain(self.drain_s)
        TlsFiles.of(self)
        check_checksum(self.kv_checksum)
        if self.arena_bytes < 0:
            raise ConfigError(f"arena_bytes is {self.arena_bytes}; it must be 0 or more", field="arena_bytes")
        if self.lease_ttl_s <= 0:
            raise ConfigError(f"lease_ttl_s is {self.lease_ttl_s}; it must be positive", field="lease_ttl_s")

    @property
    def tls(self) -> TlsFiles:
        """The files of TLS."""
        return TlsFiles.of(self)

    @property
    def has_digests(self) -> bool:
        """Whether KV frames carry a digest."""
        return self.kv_checksum != "none"
