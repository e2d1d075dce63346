"""The router that documents reach at the addresses they name, by either door."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import common_pb2
from baton.v1.inference_service_pb2 import Chunk, GenerateResponse
from tests.baton.scripted_router import background
from tests.docs.answers import answer
from tests.router.http.scripted import scripted, started, summary


@pytest.fixture(scope="session")
def addresses() -> Iterator[dict[str, str]]:
    """What a document says of addresses, and what is meant."""
    with background(answer) as (_, address):
        yield {"127.0.0.1:50051": address, "127.0.0.1:50052": address}


async def say_two_words(request: Any, call: Any) -> None:
    await call.write(started())
    for text, reason in (
        ("Ham", common_pb2.FINISH_REASON_UNSPECIFIED),
        ("burg", common_pb2.FINISH_REASON_STOP),
    ):
        await call.write(GenerateResponse(chunk=Chunk(token_ids=[9], text=text, finish_reason=reason)))
    await call.write(summary(2))


@pytest.fixture(scope="session")
def http_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An HTTP door that says "Hamburg", on a thread of its own, as programs block theirs."""
    found: list[str] = []
    is_up, is_over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve(folder: Path) -> None:
        async with scripted(folder, say_two_words) as d:
            found.append(d.server.address)
            is_up.set()
            await is_over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(tmp_path_factory.mktemp("door"))))
    thread.start()
    assert is_up.wait(20)
    yield found[0]
    loop.call_soon_threadsafe(is_over.set)
    thread.join(20)
    loop.close()
