"""The synchronous face of the SDK: the same answers and errors, without an event loop."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from baton import Client
from baton.errors import (
    InvalidRequest,
    Unavailable,
)
from tests.baton.scripted_router import (
    GUARD_S,
    Scripted,
    background,
    one_chunk_and_no_end,
)


def test_the_synchronous_face_does_the_same() -> None:
    with background() as (scripted, address), Client.connect(address) as client:
        generation = client.generate("hello", max_tokens=3)
        assert [part.text for part in generation] == ["one", "", " two"]
        assert generation.summary.finish_reason == "length"
        assert client.generate(messages=[{"role": "user", "content": "hi"}]).text() == "one two"
        assert client.list_models()[0].name == "tiny"
        assert scripted.requests[0].max_tokens == 3


def test_the_synchronous_face_raises_the_same_errors() -> None:
    async def refuse(server: Scripted, context: Any) -> None:
        raise InvalidRequest("top_p is 7", field="top_p")

    with background(refuse) as (_, address), Client.connect(address) as client:
        with pytest.raises(InvalidRequest, match="max_token is not an option"):
            client.generate("hello", max_token=3)
        with pytest.raises(InvalidRequest) as error:
            client.generate("hello").text()
        assert error.value.field == "top_p"


def test_leaving_a_synchronous_loop_early_cancels_at_the_server() -> None:
    with background(one_chunk_and_no_end) as (scripted, address), Client.connect(address) as client:
        for part in client.generate("hello"):
            assert part.text == "one"
            break
        assert scripted.cancelled.wait(GUARD_S)


def test_a_synchronous_client_closes_once_and_leaves_no_thread() -> None:
    with background() as (_, address):
        client = Client.connect(address)
        client.close()
        client.close()
        with pytest.raises(Unavailable):
            Client.connect("127.0.0.1:1", timeout_s=0.2)
    assert not any(thread.name == "baton-client" for thread in threading.enumerate())
