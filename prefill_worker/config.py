"""Settings of a prefill worker, parsed once at the entry point."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.advertise import check_advertise
from baton.errors import ConfigError
from engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(EngineConfig):
    """Settings of one prefill worker, its engine's included. Times in seconds."""

    name: str = field(default="prefill-0", metadata={"help": "name of this worker"})
    model: str = field(metadata={"help": "model folder, or the name of a pulled model"})
    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=0, metadata={"help": "gRPC port; 0 picks a free one"})
    advertise: str = field(
        default="", metadata={"help": "host:port to announce; empty announces the bound address"}
    )
    redis_url: str = field(default="redis://127.0.0.1:6379/0", repr=False, metadata={"help": "registry"})
    namespace: str = field(default="baton", metadata={"help": "prefix of this cluster's keys in Redis"})
    credit_tokens: int = field(
        default=4096, metadata={"help": "prompt tokens that routers may have in flight here"}
    )
    stall_timeout_s: float = field(
        default=10.0, metadata={"help": "a transfer that makes no progress for this long fails"}
    )
    drain_s: float = field(default=5.0, metadata={"help": "grace for running attempts at shutdown"})
    trace_file: str = field(default="", metadata={"help": "append finished spans here as JSON lines"})
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})
    ready_file: str = field(default="", metadata={"help": "written with the bound address once serving"})

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        check_advertise(self.host, self.advertise)
        if self.credit_tokens < 1:
            raise ConfigError(
                f"credit_tokens is {self.credit_tokens}; it must be at least 1", field="credit_tokens"
            )
