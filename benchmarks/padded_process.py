"""The naive side as a Target: benchmarks/padded_fifo.py in a process, prompts in and first tokens out."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Self

from baton.bench.outcome import Planned
from baton.errors import Unavailable

_START_S = 60.0
_END_S = 5.0
# The longest line on either pipe is a prompt.
_LINE_BYTES = 1 << 20


class PaddedProcess:
    """Made by `async with PaddedProcess.start(...)`. A prompt that is given up is computed all the same."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[int]] = {}

    @classmethod
    @asynccontextmanager
    async def start(cls, model: str, *, threads: int, batch_size: int) -> AsyncIterator[Self]:
        """The process, with its model loaded; raises Unavailable if it ends."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.padded_fifo", "--model", model),
            *("--threads", str(threads), "--batch-size", str(batch_size)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        side = cls(process)
        hearing = None
        try:
            async with asyncio.timeout(_START_S):
                await side._hear()
            hearing = asyncio.create_task(side._hear_all())
            yield side
        finally:
            if hearing is not None:
                hearing.cancel()
            await side._stop()

    async def answer(self, request: Planned, timeout_s: float) -> AsyncGenerator[int, None]:
        """One token."""
        number = next(self._numbers)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            assert self._process.stdin is not None
            line = json.dumps({"number": number, "token_ids": request.token_ids})
            self._process.stdin.write(line.encode() + b"\n")
            async with asyncio.timeout(timeout_s):
                await answer
            yield 1
        finally:
            self._waiting.pop(number, None)

    async def _hear_all(self) -> None:
        try:
            while True:
                message = await self._hear()
                answer = self._waiting.get(message["number"])
                if answer is not None and not answer.done():
                    answer.set_result(message["token_id"])
        except Unavailable as error:
            for answer in self._waiting.values():
                answer.set_exception(error)

    async def _hear(self) -> dict[str, int]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise Unavailable("the naive side's process has ended; its error is above")
        message: dict[str, int] = json.loads(line)
        return message

    async def _stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
