"""Settings of the pool that places decode workers on Ray."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.errors import ConfigError
from decode_worker.config import DecodeConfig

# A socket's path is limited to 107 bytes, of which Ray's session folder takes the rest.
MAX_RAY_DIR_CHARS = 30
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig(DecodeConfig):
    """Settings of a pool, and of each worker in it; workers are named decode-0, decode-1, ..."""

    workers: int = field(default=1, metadata={"help": "decode workers to run"})
    ray_address: str = field(
        default="", metadata={"help": "Ray cluster to use; empty starts one on this machine"}
    )
    dashboard_port: int = field(default=8265, metadata={"help": "port of a local Ray's dashboard"})
    ray_dir: str = field(
        default="", metadata={"help": "folder of a local Ray, at most 30 characters; empty for Ray's own"}
    )
    log_dir: str = field(default="", metadata={"help": "each worker logs to a file of its name here"})
    placement: str = field(default="PACK", metadata={"help": "PACK, SPREAD, STRICT_PACK or STRICT_SPREAD"})
    placement_timeout_s: float = field(
        default=60.0, metadata={"help": "longest wait for Ray to find room for the workers"}
    )

    def __post_init__(self) -> None:
        DecodeConfig.__post_init__(self)
        if self.workers < 1:
            raise ConfigError(f"workers is {self.workers}; it must be at least 1", field="workers")
        if self.advertise and self.workers > 1:
            raise ConfigError(
                f"advertise is one address, but each of {self.workers} workers needs its own; set host to "
                "an address that others can dial and leave advertise empty",
                field="advertise",
            )
        if len(self.ray_dir) > MAX_RAY_DIR_CHARS:
            raise ConfigError(
                f"ray_dir is {self.ray_dir!r}; Ray's sockets leave room for {MAX_RAY_DIR_CHARS} characters",
                field="ray_dir",
            )
        if self.placement not in STRATEGIES:
            raise ConfigError(
                f"placement is {self.placement!r}; it must be one of {', '.join(STRATEGIES)}",
                field="placement",
            )
