"""The HTTP door on a real socket, with a whole cluster in memory behind it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from baton.models import ModelDir
from baton.tls import TlsFiles
from router.http.app import make_app
from router.http.server import HttpServer
from router.inference import Inference
from router.tenancy.rate_limits import RateLimits
from router.tenancy.tenants import Tenants
from router.text import Text
from tests.cluster import Cluster, cluster
from tests.fakes import until
from tests.router.tiny_text import grammar_check, model_dir

KV = (2, 2, 3, 5)
NOW = 1_700_000_000.5


@dataclass
class Door:
    cluster: Cluster
    inference: Inference
    server: HttpServer
    http: httpx.AsyncClient
    model: ModelDir
    text: Text
    registry: CollectorRegistry

    @property
    def url(self) -> str:
        return f"http://{self.server.address}"

    async def idle(self) -> None:
        await until(lambda: self.inference.num_requests == 0)
        await self.cluster.idle()

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"temperature": 0, **body})

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json={"temperature": 0, **body})


@asynccontextmanager
async def door(
    folder: Path,
    *,
    model: ModelDir | None = None,
    tenants: Tenants | None = None,
    limits: RateLimits | None = None,
    **settings: Any,
) -> AsyncIterator[Door]:
    model = model or model_dir(folder / "tiny")
    async with cluster(**settings) as made:
        core = made.stage.core
        text = Text(model, asyncio.to_thread)
        registry = CollectorRegistry()
        inference = Inference(
            core=core,
            model=model,
            text=text,
            grammars=grammar_check(model),
            rng=random.Random(1),
            tenants=tenants,
            limits=limits,
        )
        app, doorman = make_app(
            core=core,
            inference=inference,
            model=model,
            text=text,
            offload=asyncio.to_thread,
            registry=registry,
            rng=random.Random(2),
            wall=lambda: NOW,
        )
        server = await HttpServer.start(
            app,
            doorman,
            host="127.0.0.1",
            port=0,
            tls=TlsFiles(),
            write_timeout_s=core.config.write_timeout_s,
            max_connections=4 * core.config.max_requests,
        )
        async with server, httpx.AsyncClient(base_url=f"http://{server.address}", timeout=20) as http:
            yield Door(made, inference, server, http, model, text, registry)


def events(body: str) -> list[Any]:
    """The events of a whole stream, by the standard's own rule."""
    assert body.endswith("\n\n")
    blocks = [block for block in body.split("\n\n") if block and not block.startswith(":")]
    lines = [block.removeprefix("event: error\n") for block in blocks]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in data]
