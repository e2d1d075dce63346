"""Settings of a prefill worker, parsed once at the entry point."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from baton.advertise import check_advertise
from baton.drain import check_drain
from baton.errors import ConfigError
from baton.tls import TlsFiles
from engine.config import EngineConfig
from kvtransfer.contract import check_checksum
from kvtransfer.sender import SenderConfig
from kvtransfer.transports.client import ClientConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(EngineConfig):
    """Settings of one prefill worker, its engine's included. Times in seconds."""

    name: str = field(default="prefill-0", metadata={"help": "name of this worker"})
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
    credit_tokens: int = field(
        default=4096, metadata={"help": "prompt tokens that routers may have in flight here"}
    )
    stall_timeout_s: float = field(
        default=10.0, metadata={"help": "a transfer that makes no progress for this long fails"}
    )
    kv_transport: str = field(
        default="auto",
        metadata={"help": "auto, shm, nixl or grpc: how KV travels; where it cannot, it goes over grpc"},
    )
    shm_folder: str = field(default="/dev/shm", metadata={"help": "folder of shared memory, on this host"})
    kv_checksum: str = field(
        default="xxh3", metadata={"help": "xxh3 or none: digest of KV frames; alike on all workers"}
    )
    kv_staging: bool = field(
        default=True,
        metadata={
            "help": "where kernels run on a GPU, keep what a prompt's last step stores a second time, in the "
            "order in which it is sent; takes device memory for the KV of 2 * max_batch_tokens tokens"
        },
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
        self.sender()
        self.transports()
        if self.credit_tokens < 1:
            raise ConfigError(
                f"credit_tokens is {self.credit_tokens}; it must be at least 1", field="credit_tokens"
            )

    @property
    def tls(self) -> TlsFiles:
        """The files of TLS."""
        return TlsFiles.of(self)

    @property
    def has_digests(self) -> bool:
        """Whether KV frames carry a digest."""
        return self.kv_checksum != "none"

    def sender(self) -> SenderConfig:
        """How transfers behave."""
        return SenderConfig(stall_timeout_s=self.stall_timeout_s, has_digests=self.has_digests)

    def transports(self) -> ClientConfig:
        """How decode workers are reached."""
        return ClientConfig(
            transport=self.kv_transport,
            shm_folder=Path(self.shm_folder),
            has_digests=self.has_digests,
            is_private=bool(self.tls_ca),
        )
