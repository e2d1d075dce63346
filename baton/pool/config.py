"""Settings of a pool: how many workers of each role, what Ray shall reserve for them, and where.

A worker's own settings are not here: they come from the sections of the roles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from baton.errors import ConfigError
from baton.pool.placing import STRATEGIES, Ask
from baton.tls import TlsFiles

ROLES: Final = ("decode", "prefill")
# A socket's path is limited to 107 bytes, of which Ray's session folder takes the rest.
MAX_RAY_DIR_CHARS: Final = 30
# Workers of one role on a local Ray.
MAX_SLOTS: Final = 64
# Workers of one role, each of which is asked every second by one process. More is a slip of the hand.
MAX_WORKERS: Final = 1_024

_CPUS = "CPUs that Ray reserves per {} worker; unset: 0 on a local Ray, where workers share cores, else 1"
_GPUS = "GPUs per {} worker; a fraction shares one"
_RESOURCES = "custom resources per {} worker, as name=amount,..."
_LABELS = 'Ray labels of the nodes for {} workers, as key=value,... or a JSON list such as ["zone=in(a,b)"]'


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Settings of a pool; its workers are named decode-0, decode-1, ..., prefill-0, ... Times in seconds."""

    decode: int = field(default=1, metadata={"help": "decode workers to run"})
    prefill: int = field(default=0, metadata={"help": "prefill workers to run"})
    namespace: str = field(default="baton", metadata={"help": "Ray namespace of the actors; one per cluster"})
    ray_address: str = field(
        default="", metadata={"help": "Ray cluster to use; empty starts one on this machine"}
    )
    ray_dir: str = field(
        default="", metadata={"help": "folder of a local Ray, at most 30 characters; empty for Ray's own"}
    )
    dashboard_host: str = field(
        default="127.0.0.1", metadata={"help": "address of a local Ray's dashboard, which asks for a token"}
    )
    dashboard_port: int = field(default=8265, metadata={"help": "port of a local Ray's dashboard"})
    control_host: str = field(
        default="127.0.0.1", metadata={"help": "address of `baton scale`, `workers` and `drain`"}
    )
    control_port: int = field(default=50053, metadata={"help": "their port; 0 picks a free one"})
    health_port: int | None = field(
        default=None,
        metadata={"help": "plain-text port of the health service alone, for probes; 0 picks a free one"},
    )
    strategy: str = field(
        default="PACK",
        metadata={"help": "PACK, SPREAD, STRICT_PACK or STRICT_SPREAD: a role's workers over the nodes"},
    )
    decode_cpus: float | None = field(default=None, metadata={"help": _CPUS.format("decode")})
    decode_gpus: float = field(default=0.0, metadata={"help": _GPUS.format("decode")})
    decode_resources: tuple[str, ...] = field(default=(), metadata={"help": _RESOURCES.format("decode")})
    decode_node_labels: tuple[str, ...] = field(default=(), metadata={"help": _LABELS.format("decode")})
    prefill_cpus: float | None = field(default=None, metadata={"help": _CPUS.format("prefill")})
    prefill_gpus: float = field(default=0.0, metadata={"help": _GPUS.format("prefill")})
    prefill_resources: tuple[str, ...] = field(default=(), metadata={"help": _RESOURCES.format("prefill")})
    prefill_node_labels: tuple[str, ...] = field(default=(), metadata={"help": _LABELS.format("prefill")})
    placement_timeout_s: float = field(
        default=60.0, metadata={"help": "longest wait for room at the start; later ones wait on"}
    )
    start_timeout_s: float = field(
        default=600.0, metadata={"help": "a worker that takes longer until it serves is started again"}
    )
    unhealthy_s: float = field(
        default=15.0, metadata={"help": "a worker that makes no progress for this long is replaced"}
    )
    drain_s: float = field(
        default=30.0,
        metadata={"help": "grace for the attempts of a worker that leaves; holds for all workers"},
    )
    keep_workers: bool = field(
        default=False,
        metadata={"help": "SIGTERM leaves the workers of a given cluster running, for the next pool"},
    )
    follow_config: bool = field(
        default=False,
        metadata={"help": "when the settings file changes, leave workers to a new pool that reads it"},
    )
    log_dir: str = field(default="", metadata={"help": "each worker logs to a file of its name here"})
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})
    ready_file: str = field(
        default="", metadata={"help": "written with dashboard_url, control_address and pid once all serve"}
    )
    tls_cert: str = field(default="", metadata={"help": "PEM file: this process's certificate, for TLS"})
    tls_key: str = field(default="", metadata={"help": "PEM file: private key of tls_cert"})
    tls_ca: str = field(default="", metadata={"help": "PEM file: authorities that sign peers' certificates"})
    tls_server_name: str = field(
        default="", metadata={"help": "name in every worker's certificate; empty for the host dialled"}
    )

    def __post_init__(self) -> None:
        TlsFiles.of(self)
        for role in ROLES:
            if not 0 <= getattr(self, role) <= MAX_WORKERS:
                raise ConfigError(
                    f"{role} is {getattr(self, role)}; it must be 0 to {MAX_WORKERS}", field=role
                )
            self.ask(role)
        if self.decode + self.prefill == 0:
            raise ConfigError("decode and prefill are 0; a pool has at least one worker", field="decode")
        if len(self.ray_dir) > MAX_RAY_DIR_CHARS:
            raise ConfigError(
                f"ray_dir is {self.ray_dir!r}; Ray's sockets leave room for {MAX_RAY_DIR_CHARS} characters",
                field="ray_dir",
            )
        for name in ("placement_timeout_s", "start_timeout_s", "unhealthy_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive", field=name)
        if self.strategy not in STRATEGIES:
            raise ConfigError(
                f"strategy is {self.strategy!r}; it must be one of {', '.join(STRATEGIES)}", field="strategy"
            )
        if self.keep_workers and not self.ray_address:
            raise ConfigError(
                "keep_workers is set, but a local Ray ends with its pool; give ray_address",
                field="keep_workers",
            )

        if self.follow_config and not self.keep_workers:
            raise ConfigError(
                "follow_config is set and keep_workers is not: each change would end all workers; set both",
                field="keep_workers",
            )

    @property
    def tls(self) -> TlsFiles:
        """The files of TLS."""
        return TlsFiles.of(self)

    def leaves_workers(self, *, is_asked: bool) -> bool:
        """Whether the workers go on when the pool ends.

        is_asked: it was told to end. Whatever else ends it is no reason to end workers that serve, where
            another pool can take them over.
        """
        return bool(self.ray_address) and (self.keep_workers or not is_asked)

    def ask(self, role: str) -> Ask:
        """What Ray is asked for, per worker; raises ConfigError naming the setting that is wrong."""
        amounts = {"CPU": self._cpus(role), "GPU": getattr(self, f"{role}_gpus")}
        if not self.ray_address:
            # A resource of our own: several workers may share the cores of a small machine, which one
            # CPU per actor would forbid.
            amounts[slot(role)] = 1.0
        for name, value in self._pairs(f"{role}_resources").items():
            amounts[name] = _amount(value, f"{role}_resources")
        fields = {"CPU": f"{role}_cpus", "GPU": f"{role}_gpus"}
        for name, amount in amounts.items():
            _check_amount(name, amount, fields.get(name, f"{role}_resources"))
        resources = {name: amount for name, amount in amounts.items() if amount > 0}
        if not resources:
            raise ConfigError(
                f"{role}_cpus is 0 and nothing else is asked for, but Ray places only what needs something; "
                f"set {role}_cpus, {role}_gpus or {role}_resources",
                field=f"{role}_cpus",
            )
        return Ask(resources=resources, labels=self._pairs(f"{role}_node_labels"))

    def _cpus(self, role: str) -> float:
        given: float | None = getattr(self, f"{role}_cpus")
        if given is not None:
            return given
        return 1.0 if self.ray_address else 0.0

    def _pairs(self, field_name: str) -> dict[str, str]:
        pairs = {}
        for item in getattr(self, field_name):
            key, equals, value = item.partition("=")
            if not key.strip() or not equals or not value.strip():
                raise ConfigError(f"{field_name} has {item!r}; write name=value", field=field_name)
            pairs[key.strip()] = value.strip()
        return pairs


def slot(role: str) -> str:
    """The custom resource that stands for one worker of that role on a local Ray."""
    return f"baton_{role}"


def _amount(text: str, field_name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{field_name} has {text!r}, which is not a number", field=field_name) from None


def _check_amount(name: str, amount: float, field_name: str) -> None:
    if amount < 0 or not (amount < 1 or amount.is_integer()):
        raise ConfigError(
            f"{field_name} asks for {name} {amount:g}; Ray takes a fraction below 1 or a whole number",
            field=field_name,
        )
