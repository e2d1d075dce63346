"""The worker registry in Redis: who could be talked to.

Owns the keys and their values. One key per incarnation of a
worker holds a small JSON object and ends by itself. There is no Lua and no
blocking command, so any Redis-compatible server will do. It must not decide who
is alive: an empty Redis means that nobody was announced, not that nobody is
there.

    <namespace>:worker:<incarnation, 16 hex digits>
        {"name": "prefill-0", "role": "prefill", "incarnation": "00c0ffee00c0ffee",
         "address": "10.0.0.7:50051", "draining": false}
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, cast

from redis.exceptions import RedisError

from baton.errors import ConfigError, Unavailable
from baton.logs import get_logger
from baton.ports import Registry, WorkerInfo
from baton.redis_client import asking, open_redis

# Redis is shared and may hold anything under our prefix; these bound what a watcher will take in.
_MAX_VALUE_BYTES: Final = 2_048
_MAX_WORKERS: Final = 4_096
_MAX_NAME_CHARS: Final = 128
_MAX_ADDRESS_CHARS: Final = 300
_ROLES: Final = frozenset({"prefill", "decode"})

_SCAN_COUNT: Final = 1_000

# Life of a worker's announcement unless refreshed, in seconds.
ANNOUNCED_S: Final = 6.0
# Longest wait for Redis where the caller has better things to do, such as leaving, in seconds.
_AT_ONCE_S: Final = 1.0

log = get_logger(__name__)


class RedisRegistry:
    """A Registry port behind which one Redis stands; it may come and go.

    num_failures counts the polls that have failed in a row.

    async with RedisRegistry("redis://127.0.0.1:6379/0", "baton") as registry:
        async for workers in registry.watch():
            ...
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        rng: random.Random | None = None,
        poll_s: float = 0.5,
        max_backoff_s: float = 3.0,
        grace_s: float = ANNOUNCED_S,
    ) -> None:
        """Connects on first use.

        Args:
            url: redis://, rediss:// or unix://; a password in it is never shown.
            namespace: prefix of all keys; one per cluster.
            rng: spreads the polls of several routers.
            poll_s: pause between two polls of a watch, in seconds.
            max_backoff_s: longest pause between two attempts to reach Redis, in seconds. All know each
                other again within 10 s of its return: 2 s until a step under way fails, this pause, and
                meanwhile the workers announce themselves within 4 s.
            grace_s: how long those stand who are not announced yet by a Redis that was away, in seconds.

        Raises:
            ConfigError: the URL or the namespace cannot be used.
        """
        if not re.fullmatch(r"[\w.-]{1,64}", namespace, re.ASCII):
            allowed = "1 to 64 letters, digits, '_', '.' or '-'"
            raise ConfigError(f"namespace {namespace!r} is not {allowed}", field="namespace")
        self._redis = open_redis(url, self._connected)
        self._prefix = f"{namespace}:worker:"
        self._rng = rng or random.Random()
        self._poll_s = poll_s
        self._max_backoff_s = max_backoff_s
        self._grace_s = grace_s
        self._was_connected = False
        self._back_at = -math.inf
        self.num_failures = 0
        self._refused_keys: set[bytes] = set()

    async def check(self) -> None:
        """Raises Unavailable unless Redis answers."""
        await asking(self._redis, self._redis.ping())

    async def register(self, info: WorkerInfo, ttl_s: float) -> None:
        """Announces a worker for ttl_s seconds. Raises Unavailable when Redis cannot be reached."""
        await asking(
            self._redis, self._redis.set(self._key(info), encode(info), px=max(1, round(ttl_s * 1000)))
        )

    async def deregister(self, info: WorkerInfo) -> None:
        """Withdraws the announcement. Raises Unavailable when Redis cannot be reached."""
        await asking(self._redis, self._redis.delete(self._key(info)))

    async def watch(self) -> AsyncIterator[Sequence[WorkerInfo]]:
        """Yields the announced workers, by name, at once and then whenever they change.

        Never raises because of Redis: while it is away, the last known workers stand. They stand on for
        grace_s seconds, because a Redis that has come back empty hears of them one by one. It may have been
        away between two polls: that the connection had to be made again tells. At all other times a worker
        goes at once when its announcement ends or is withdrawn.
        """
        known: tuple[WorkerInfo, ...] | None = None
        while True:
            found = await self._poll()
            if found is not None and known and self._is_just_back():
                found = _joined(found, known)
            if known is None or (found is not None and found != known):
                known = found or ()
                yield known
            await asyncio.sleep(self._pause_s())

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _key(self, info: WorkerInfo) -> str:
        return f"{self._prefix}{info.incarnation:016x}"

    async def _poll(self) -> tuple[WorkerInfo, ...] | None:
        """The announced workers, or None when Redis is away."""
        try:
            workers = await self._read()
        except Unavailable as error:
            if self.num_failures == 0:
                log.warning("registry away", reason=error.message)
            self.num_failures += 1
            return None
        if self.num_failures:
            log.info("registry back", num_failures=self.num_failures)
            self._back_at = asyncio.get_running_loop().time()
        self.num_failures = 0
        return workers

    def _connected(self) -> None:
        if self._was_connected:
            self._back_at = asyncio.get_running_loop().time()
        self._was_connected = True

    def _is_just_back(self) -> bool:
        return asyncio.get_running_loop().time() < self._back_at + self._grace_s

    def _pause_s(self) -> float:
        if self.num_failures == 0:
            return self._rng.uniform(0.8, 1.2) * self._poll_s
        # Full jitter: all routers lose the same Redis at the same moment.
        ceiling = min(self._max_backoff_s, self._poll_s * 2.0 ** min(self.num_failures, 16))
        return self._rng.uniform(0.1, 1.0) * ceiling

    async def _read(self) -> tuple[WorkerInfo, ...]:
        keys = sorted(await asking(self._redis, self._scan()))
        values = await asking(self._redis, self._get_starts(keys)) if keys else []
        found = [self._decode(key, value) for key, value in zip(keys, values, strict=True) if value != b""]
        workers = [info for info in found if info is not None]
        return _by_name(workers)

    async def _scan(self) -> set[bytes]:
        keys: set[bytes] = set()
        # The namespace holds none of the pattern's special characters.
        async for key in self._redis.scan_iter(match=f"{self._prefix}*", count=_SCAN_COUNT):
            keys.add(key)
            if len(keys) >= _MAX_WORKERS:
                break
        return keys

    async def _get_starts(self, keys: Sequence[bytes]) -> list[object]:
        """The first bytes of each value, one more than is allowed; an exception where it is no string."""
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.getrange(key, 0, _MAX_VALUE_BYTES)
        values = cast("list[object]", await pipeline.execute(raise_on_error=False))
        for value in values:
            # A foreign type under one key is that key's fault; anything else is Redis's.
            if isinstance(value, RedisError) and not str(value).startswith("WRONGTYPE"):
                raise value
        return values

    def _decode(self, key: bytes, value: object) -> WorkerInfo | None:
        try:
            info = decode(value)
            if self._key(info).encode() != key:
                raise ValueError("the key and the value name different incarnations")
        except ValueError as error:
            self._refuse(key, str(error))
            return None
        self._refused_keys.discard(key)
        return info

    def _refuse(self, key: bytes, reason: str) -> None:
        if key in self._refused_keys:
            return
        if len(self._refused_keys) >= _MAX_WORKERS:
            self._refused_keys.clear()
        self._refused_keys.add(key)
        log.warning("registry entry ignored", key=key[:200].decode("ascii", "replace"), reason=reason)


@dataclass(slots=True)
class Announcement:
    """A worker's announcement while it is kept fresh; update() changes it at once."""

    registry: Registry
    info: WorkerInfo
    ttl_s: float = ANNOUNCED_S
    _is_away: bool = False

    async def update(self, info: WorkerInfo) -> None:
        """Announces changed facts, for example draining, of the same incarnation.

        Waits a second at most: what Redis has not heard by then, the next refresh says again.
        """
        if info.incarnation != self.info.incarnation:
            raise ValueError("an announcement is about one incarnation")
        self.info = info
        with suppress(TimeoutError):
            async with asyncio.timeout(_AT_ONCE_S):
                await self.refresh()

    async def refresh(self) -> None:
        """Announces again. A Redis that is away is logged once: the next refresh may find it."""
        try:
            await self.registry.register(self.info, self.ttl_s)
        except Unavailable as error:
            if not self._is_away:
                log.warning("announcement failed", worker=self.info.name, reason=error.message)
            self._is_away = True
        else:
            self._is_away = False

    async def keep(self) -> None:
        """Announces for ever, with pauses of a sixth to a third of the time to live: two may fail in a row.

        They vary, or workers that were started together would ask Redis together.
        """
        # The incarnation is random and differs from process to process: a seed that needs no argument.
        rng = random.Random(self.info.incarnation)
        while True:
            await asyncio.sleep(rng.uniform(0.5, 1.0) * self.ttl_s / 3)
            await self.refresh()

    async def withdraw(self) -> None:
        """Withdraws the announcement; if Redis is away or slow, it ends by itself."""
        try:
            async with asyncio.timeout(_AT_ONCE_S):
                await self.registry.deregister(self.info)
        except TimeoutError:
            log.warning("withdrawal failed", worker=self.info.name, reason=f"no answer in {_AT_ONCE_S:g} s")
        except Unavailable as error:
            log.warning("withdrawal failed", worker=self.info.name, reason=error.message)


@asynccontextmanager
async def registering(
    registry: Registry, info: WorkerInfo, ttl_s: float = ANNOUNCED_S
) -> AsyncIterator[Announcement]:
    """Announces a worker when the block begins and withdraws it at the end, whatever happens to Redis.

    Inside the block keep() must run, as one of the services whose failure ends the worker.
    """
    announcement = Announcement(registry, info, ttl_s)
    await announcement.refresh()
    try:
        yield announcement
    finally:
        await announcement.withdraw()


def _by_name(workers: Iterable[WorkerInfo]) -> tuple[WorkerInfo, ...]:
    return tuple(sorted(workers, key=lambda info: (info.name, info.incarnation)))


def _joined(found: Iterable[WorkerInfo], known: Iterable[WorkerInfo]) -> tuple[WorkerInfo, ...]:
    """Those found, as they are now, and those only known."""
    return _by_name(({info.incarnation: info for info in known} | {i.incarnation: i for i in found}).values())


def encode(info: WorkerInfo) -> str:
    """The value stored for a worker. The incarnation is hexadecimal: JSON numbers lose 64-bit integers."""
    return json.dumps(
        {
            "name": info.name,
            "role": info.role,
            "incarnation": f"{info.incarnation:016x}",
            "address": info.address,
            "draining": info.draining,
        }
    )


def decode(value: object) -> WorkerInfo:
    """The worker a stored value describes; unknown keys are ignored, for newer workers.

    Raises:
        ValueError: it does not describe one; the message names the part at fault.
    """
    if not isinstance(value, bytes) or len(value) > _MAX_VALUE_BYTES:
        raise ValueError(f"not a string of at most {_MAX_VALUE_BYTES} bytes")
    try:
        entry = json.loads(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    return WorkerInfo(
        name=_matching(entry, "name", rf"[\w.-]{{1,{_MAX_NAME_CHARS}}}"),
        role=_matching(entry, "role", "|".join(sorted(_ROLES))),
        incarnation=int(_matching(entry, "incarnation", "[0-9a-f]{16}"), 16),
        address=_matching(entry, "address", rf"(?=.{{3,{_MAX_ADDRESS_CHARS}}}$)[\w.\-:\[\]%]+:\d{{1,5}}"),
        draining=_boolean(entry, "draining"),
    )


def _matching(entry: dict[str, Any], key: str, pattern: str) -> str:
    text = entry.get(key)
    if not isinstance(text, str) or not re.fullmatch(pattern, text, re.ASCII):
        raise ValueError(f"{key} is not usable")
    return text


def _boolean(entry: dict[str, Any], key: str) -> bool:
    flag = entry.get(key, False)
    if not isinstance(flag, bool):
        raise ValueError(f"{key} is not usable")
    return flag
