"""Settings of a router, parsed once at the entry point."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from baton.errors import ConfigError
from baton.tls import TlsFiles

PLACEMENTS = ("auto", "disaggregated", "colocated")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of one router. Times in seconds; sizes in the unit their name ends with."""

    name: str = field(default="router-0", metadata={"help": "name of this router"})
    model: str = field(metadata={"help": "model folder, or the name of a pulled model"})
    host: str = field(default="127.0.0.1", metadata={"help": "address of the public ports"})
    port: int = field(default=50051, metadata={"help": "public gRPC port; 0 picks a free one"})
    http_port: int = field(
        default=8000,
        metadata={"help": "public HTTP port, with OpenAI's API; 0 picks a free one"},
    )
    # Apart from `host`, so that opening the public ports opens nothing else.
    admin_host: str = field(default="127.0.0.1", metadata={"help": "address of the admin port"})
    admin_port: int = field(default=50052, metadata={"help": "admin gRPC port; 0 picks a free one"})
    health_port: int | None = field(
        default=None,
        metadata={"help": "plain-text port of the health service alone, for probes; 0 picks a free one"},
    )
    redis_url: str = field(default="redis://127.0.0.1:6379/0", repr=False, metadata={"help": "registry"})
    namespace: str = field(default="baton", metadata={"help": "prefix of this cluster's keys in Redis"})
    tls_cert: str = field(default="", metadata={"help": "PEM file: this process's certificate, for TLS"})
    tls_key: str = field(default="", metadata={"help": "PEM file: private key of tls_cert"})
    tls_ca: str = field(default="", metadata={"help": "PEM file: authorities that sign peers' certificates"})
    client_ca: str = field(
        default="",
        metadata={"help": "PEM file: authorities that sign clients' certificates; empty asks for none"},
    )
    tls_server_name: str = field(
        default="", metadata={"help": "name in every worker's certificate; empty for the host dialled"}
    )
    placement: str = field(
        default="auto",
        metadata={
            "help": "auto, disaggregated or colocated: who computes prompts; auto lets a decode worker "
            "compute a short one where that is predicted to be faster"
        },
    )
    local_max_tokens: int = field(
        default=256, metadata={"help": "longest rest of a prompt that auto lets a decode worker compute"}
    )
    tenants_file: str = field(
        default="",
        metadata={"help": "TOML file: who may call, with which share and limits; empty lets everybody in"},
    )
    bucket_edges: tuple[int, ...] = field(
        default=(128, 256, 512), metadata={"help": "length bucket edges, in uncached tokens, ascending"}
    )
    learn_buckets: bool = field(
        default=False, metadata={"help": "move the edges so that buckets carry equal predicted work"}
    )
    ttft_base_ms: float = field(
        default=500.0, metadata={"help": "objective for the first token: this, for requests that name none"}
    )
    ttft_per_token_ms: float = field(
        default=3.0, metadata={"help": "and this per token of the prompt, in milliseconds"}
    )
    itl_objective_ms: float = field(
        default=150.0, metadata={"help": "gap between tokens that placement keeps to where it can"}
    )
    max_queue: int = field(default=256, metadata={"help": "requests that may wait, over all buckets"})
    max_requests: int = field(
        default=4096, metadata={"help": "requests in flight; more are refused before they cost anything"}
    )
    max_wait_s: float = field(
        default=5.0, metadata={"help": "a request that waited this long is no longer overtaken"}
    )
    output_quantile: float = field(
        default=0.9,
        metadata={"help": "share of answers that blocks are kept free for as they grow; 0 keeps none"},
    )
    reserve_timeout_s: float = field(default=2.0, metadata={"help": "longest wait for a reservation"})
    resume_wait_s: float = field(
        default=10.0, metadata={"help": "how long a request waits for another worker after one died"}
    )
    max_attempts: int = field(
        default=8, metadata={"help": "attempts in a row without committed KV before a request fails"}
    )
    default_max_tokens: int = field(
        default=0,
        metadata={
            "help": "max_tokens of requests that name none; 0: 128 over gRPC, 16 for a completion over HTTP, "
            "what the context has room for in a chat there"
        },
    )
    write_timeout_s: float = field(
        default=30.0, metadata={"help": "a client that reads nothing for this long is cut off"}
    )
    drain_s: float = field(
        default=30.0, metadata={"help": "grace for running requests at shutdown; the rest goes on elsewhere"}
    )
    dashboard_url: str = field(default="", metadata={"help": "address of the Ray dashboard, for status"})
    trace_file: str = field(default="", metadata={"help": "append finished spans here as JSON lines"})
    decision_log: str = field(
        default="",
        metadata={"help": "append what was decided here as JSON lines, for python -m router.replay"},
    )
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})
    ready_file: str = field(default="", metadata={"help": "written with the bound addresses once serving"})

    def __post_init__(self) -> None:
        TlsFiles.of(self, self.client_ca)
        if not self.bucket_edges or any(a >= b for a, b in pairwise((0, *self.bucket_edges))):
            raise ConfigError(
                f"bucket_edges is {self.bucket_edges}; give positive token counts in ascending order",
                field="bucket_edges",
            )
        if self.placement not in PLACEMENTS:
            raise ConfigError(
                f"placement is {self.placement!r}; it must be one of {', '.join(PLACEMENTS)}",
                field="placement",
            )
        for name in ("ttft_base_ms", "itl_objective_ms", "reserve_timeout_s", "write_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0", field=name)
        times = ("ttft_per_token_ms", "max_wait_s", "resume_wait_s", "drain_s")
        for name in (*times, "local_max_tokens", "default_max_tokens"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0", field=name)
        if not 0 <= self.output_quantile < 1:
            raise ConfigError(
                f"output_quantile is {self.output_quantile}; it must be at least 0 and below 1",
                field="output_quantile",
            )
        for name in ("max_queue", "max_requests", "max_attempts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1", field=name)

    @property
    def tls(self) -> TlsFiles:
        """The files of TLS."""
        return TlsFiles.of(self, self.client_ca)
