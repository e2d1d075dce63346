"""Who is calling: the tenants of a router, told apart by the API keys of their calls.

Owns the tenants' file and the look-up of a key. It must not know what a tenant has used
(router/tenancy/rate_limits.py) or waits for (router/queueing/buckets.py), and it never sees a key but in
passing: the file holds digests, which `baton tenants hash` prints. The file is read once; a change to it
takes effect when the router restarts.

    [tenants.search]
    keys = ["sha256:9f86d0..."]     # at least one; several while a key is being changed
    weight = 2.0                    # share in fair queueing; default 1
    requests_per_minute = 600       # default: no limit
    tokens_per_minute = 100000      # default: no limit; of the prompt at admission, of answers when they end
    max_priority = "high"           # low, normal or high; default normal
"""

from __future__ import annotations

import hmac
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from baton.api_keys import DIGEST_PREFIX, METADATA_KEY, SCHEME, digest_of
from baton.errors import ConfigError, InvalidRequest, Unauthenticated
from baton.priorities import PRIORITIES, PRIORITY_NAMES
from baton.v1 import common_pb2

Metadata = Iterable[tuple[str, str | bytes]]

# Names are parts of keys in Redis and labels of metrics.
_NAME: Final = r"[\w.-]{1,64}"
_DIGEST: Final = rf"{DIGEST_PREFIX}[0-9a-f]{{64}}"
# Far above any traffic, and far below where counters lose digits.
_MOST_PER_MINUTE: Final = 10**12
# A queue that visits tenants in turn gives one of a vanishing share its turn after as many rounds.
_WEIGHTS: Final = (0.001, 1000.0)
_KEYS: Final = ("keys", "weight", "requests_per_minute", "tokens_per_minute", "max_priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One customer of the cluster; its cached prefixes are its own.

    name: "" for everybody, where nobody is told apart.
    weight: share in fair queueing, 0.001 to 1000.
    requests_per_minute, tokens_per_minute: limits over all routers, at least 1; None for none.
    max_priority: the highest that its requests may have.
    """

    name: str
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_priority: common_pb2.Priority.ValueType = common_pb2.PRIORITY_NORMAL

    @property
    def is_limited(self) -> bool:
        """Whether it has a rate limit."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    def priority(self, wanted: common_pb2.Priority.ValueType) -> common_pb2.Priority.ValueType:
        """The priority of a request of this tenant.

        wanted: what the request says; unspecified is normal, or the tenant's highest if that is lower.

        Raises InvalidRequest, field "priority", for one that does not exist or is too high.
        """
        if wanted == common_pb2.PRIORITY_UNSPECIFIED:
            return min(common_pb2.PRIORITY_NORMAL, self.max_priority)
        if wanted not in PRIORITY_NAMES:
            raise InvalidRequest(
                f"priority {wanted} is unknown; it must be one of {', '.join(PRIORITIES)}", field="priority"
            )
        if wanted > self.max_priority:
            raise InvalidRequest(
                f"priority {PRIORITY_NAMES[wanted]!r} is above what tenant {self.name!r} may use, "
                f"{PRIORITY_NAMES[self.max_priority]!r}; ask for that, or have max_priority raised",
                field="priority",
            )
        return wanted


ANONYMOUS: Final = Tenant(name="", max_priority=common_pb2.PRIORITY_HIGH)


class Tenants:
    """The tenants of one router. Without any, everybody is ANONYMOUS.

    tenants: each with the digests of its keys.
    """

    def __init__(self, tenants: Mapping[Tenant, Sequence[str]]) -> None:
        self._by_digest = {digest: (digest, tenant) for tenant, ds in tenants.items() for digest in ds}
        self._all = tuple(tenants)

    @classmethod
    def load(cls, path: str) -> Self:
        """The tenants that a file names; "" is no file, and nobody is told apart.

        Raises ConfigError, naming the place, if the file cannot be read or says what it must not.
        """
        if not path:
            return cls({})
        try:
            document = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tenants_file is {path!r}, which cannot be read as TOML: {error}", field="tenants_file"
            ) from None
        try:
            return cls(_read(document))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", field=error.field) from None

    def __iter__(self) -> Iterator[Tenant]:
        """All of them, in the order of the file."""
        return iter(self._all)

    def of(self, metadata: Metadata | None) -> Tenant:
        """Whose call it is.

        metadata: that of the gRPC call.

        Raises Unauthenticated, where tenants are told apart, for a call without a known key.
        """
        if not self._all:
            return ANONYMOUS
        digest = digest_of(_secret(metadata or ()))
        # The dictionary may take longer for digests that begin alike, but nobody can choose the digest of
        # a guess; what decides takes the same time for all.
        known, tenant = self._by_digest.get(digest, ("", None))
        if tenant is None or not hmac.compare_digest(known, digest):
            raise Unauthenticated(
                f"the API key in the call's metadata {METADATA_KEY!r} is not known here; ask those who run "
                "this cluster for one, or have its digest added to the tenants' file",
                field=METADATA_KEY,
            )
        return tenant


def _secret(metadata: Metadata) -> str:
    """The key of a call; raises Unauthenticated if there is none."""
    values = [value for key, value in metadata if key == METADATA_KEY]
    if len(values) == 1 and isinstance(values[0], str):
        scheme, _, secret = values[0].partition(" ")
        if scheme.lower() == SCHEME.lower() and secret.strip():
            return secret.strip()
    raise Unauthenticated(
        f"this router serves known tenants only: each call needs one metadata {METADATA_KEY!r} of the form "
        f"'{SCHEME} KEY'; it is api_key in the SDK, and BATON_API_KEY for the commands",
        field=METADATA_KEY,
    )


def _read(document: Mapping[str, Any]) -> dict[Tenant, list[str]]:
    tables = document.get("tenants")
    if not isinstance(tables, dict) or not tables or len(document) > 1:
        raise ConfigError(
            "the tenants' file must have tables [tenants.NAME], at least one, and nothing else",
            field="tenants",
        )
    tenants: dict[Tenant, list[str]] = {}
    owners: dict[str, str] = {}
    for name, table in tables.items():
        tenant, digests = _tenant(name, table)
        for digest in digests:
            if digest in owners:
                raise _refusal(name, "keys", f"repeats a digest that {owners[digest]!r} has")
            owners[digest] = name
        tenants[tenant] = digests
    return tenants


def _tenant(name: str, table: object) -> tuple[Tenant, list[str]]:
    if not re.fullmatch(_NAME, name, re.ASCII):
        raise ConfigError(
            f"tenant {name!r}: a name is 1 to 64 letters, digits, '_', '.' or '-'", field=f"tenants.{name}"
        )
    if not isinstance(table, dict):
        raise ConfigError(f"tenants.{name} must be a table", field=f"tenants.{name}")
    for key in table:
        if key not in _KEYS:
            raise _refusal(name, key, f"is unknown; allowed: {', '.join(_KEYS)}")
    tenant = Tenant(
        name=name,
        weight=_weight(name, table),
        requests_per_minute=_limit(name, table, "requests_per_minute"),
        tokens_per_minute=_limit(name, table, "tokens_per_minute"),
        max_priority=_max_priority(name, table),
    )
    return tenant, _digests(name, table)


def _digests(name: str, table: Mapping[str, Any]) -> list[str]:
    digests = table.get("keys")
    # The value is not quoted: it may be a key that somebody took for its digest.
    if not isinstance(digests, list) or not digests:
        raise _refusal(name, "keys", "must be a list with at least one digest")
    for digest in digests:
        if not isinstance(digest, str) or not re.fullmatch(_DIGEST, digest):
            raise _refusal(
                name, "keys", 'holds what is no digest, "sha256:" and 64 digits; see `baton tenants hash`'
            )
    return digests


def _weight(name: str, table: Mapping[str, Any]) -> float:
    weight = table.get("weight", 1.0)
    if type(weight) not in {int, float} or not _WEIGHTS[0] <= weight <= _WEIGHTS[1]:
        raise _refusal(name, "weight", f"is {weight!r}; it must be from {_WEIGHTS[0]:g} to {_WEIGHTS[1]:g}")
    return float(weight)


def _limit(name: str, table: Mapping[str, Any], key: str) -> int | None:
    limit = table.get(key)
    if limit is not None and (type(limit) is not int or not 1 <= limit <= _MOST_PER_MINUTE):
        raise _refusal(name, key, f"is {limit!r}; it must be a whole number from 1 to {_MOST_PER_MINUTE}")
    return limit


def _max_priority(name: str, table: Mapping[str, Any]) -> common_pb2.Priority.ValueType:
    priority = table.get("max_priority", "normal")
    if not isinstance(priority, str) or priority not in PRIORITIES:
        raise _refusal(name, "max_priority", f"is {priority!r}; it must be one of {', '.join(PRIORITIES)}")
    return PRIORITIES[priority]


def _refusal(name: str, key: str, problem: str) -> ConfigError:
    return ConfigError(f"tenants.{name}.{key} {problem}", field=f"tenants.{name}.{key}")
