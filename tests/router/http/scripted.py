"""The HTTP door over an inference that a test writes, message by message."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from baton.models import ModelDir
from baton.tls import TlsFiles
from baton.v1 import common_pb2
from baton.v1.inference_service_pb2 import Chunk, GenerateRequest, GenerateResponse, Started, Summary
from router.config import RouterConfig
from router.http.app import make_app
from router.http.doorman import Doorman
from router.http.server import HttpServer
from router.inference import Call
from router.text import Text
from tests.router.http.door import NOW
from tests.router.tiny_text import model_dir

Script = Callable[[GenerateRequest, Call], Awaitable[None]]


def started() -> GenerateResponse:
    return GenerateResponse(started=Started(request_id="r", seed=1, num_prompt_tokens=3))


def chunk(text: str, *, end: bool = False, index: int = 0) -> GenerateResponse:
    reason = common_pb2.FINISH_REASON_LENGTH if end else common_pb2.FINISH_REASON_UNSPECIFIED
    return GenerateResponse(chunk=Chunk(index=index, token_ids=[9], text=text, finish_reason=reason))


def summary(num_output_tokens: int) -> GenerateResponse:
    return GenerateResponse(summary=Summary(num_prompt_tokens=3, num_output_tokens=num_output_tokens))


class ScriptedInference:
    """num_running: scripts that have begun and not ended, by whatever end."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.num_running = 0
        self.num_requests = 0

    def check_key(self, metadata: Any) -> None:
        pass

    def models(self, metadata: Any) -> list[Any]:
        return []

    async def generate(self, request: GenerateRequest, call: Call) -> None:
        self.num_requests += 1
        self.num_running += 1
        try:
            await self._script(request, call)
        finally:
            self.num_running -= 1


@dataclass
class Scripted:
    inference: ScriptedInference
    server: HttpServer
    doorman: Doorman
    http: httpx.AsyncClient
    fleet: SimpleNamespace

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "x", **body})


@asynccontextmanager
async def scripted(
    folder: Path,
    script: Script,
    *,
    model: ModelDir | None = None,
    tls: TlsFiles | None = None,
    write_timeout_s: float = 20.0,
    max_connections: int = 2000,
    port: int = 0,
    **settings: Any,
) -> AsyncIterator[Scripted]:
    inference = ScriptedInference(script)
    model = model or model_dir(folder / "tiny")
    fleet = SimpleNamespace(is_complete=True, shortage="nobody is there")
    core: Any = SimpleNamespace(config=RouterConfig(model="m", **settings), fleet=fleet)
    fake: Any = inference
    app, doorman = make_app(
        core=core,
        inference=fake,
        model=model,
        text=Text(model, asyncio.to_thread),
        offload=asyncio.to_thread,
        registry=CollectorRegistry(),
        rng=random.Random(2),
        wall=lambda: NOW,
    )
    server = await HttpServer.start(
        app,
        doorman,
        host="127.0.0.1",
        port=port,
        tls=tls or TlsFiles(),
        write_timeout_s=write_timeout_s,
        max_connections=max_connections,
    )
    async with server, httpx.AsyncClient(base_url=f"http://{server.address}", timeout=20) as http:
        yield Scripted(inference, server, doorman, http, fleet)
