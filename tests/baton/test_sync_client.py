"""The synchronous face of the SDK: the same answers and errors, without an event loop."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from baton import AsyncClient, Client
from baton.errors import BatonError, Cancelled, DeadlineExceeded, InvalidRequest, Unavailable
from tests.baton.scripted_router import (
    GUARD_S,
    Scripted,
    background,
    one_chunk_and_no_end,
    serving,
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


def test_leaving_a_block_cancels_at_the_server() -> None:
    with background(one_chunk_and_no_end) as (scripted, address), Client.connect(address) as client:
        with client.generate("hello") as generation:
            assert next(iter(generation)).text == "one"
        assert scripted.cancelled.wait(GUARD_S)


def waiting_reader(client: Client) -> tuple[Any, threading.Thread, list[str], list[BatonError]]:
    """A thread that has read one chunk and waits for the next."""
    generation, texts, errors = client.generate("hello"), list[str](), list[BatonError]()
    has_begun = threading.Event()

    def read() -> None:
        try:
            for part in generation:
                texts.append(part.text)
                has_begun.set()
        except BatonError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert has_begun.wait(GUARD_S)
    return generation, thread, texts, errors


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_another_thread_ends_what_one_waits_for(end: str) -> None:
    with background(one_chunk_and_no_end) as (scripted, address), Client.connect(address) as client:
        generation, thread, texts, errors = waiting_reader(client)
        (generation.cancel if end == "cancel" else client.close)()
        thread.join(GUARD_S)
        assert not thread.is_alive()
        assert texts == ["one"]
        assert [type(error) for error in errors] == [Cancelled]
        assert scripted.cancelled.wait(GUARD_S)


def test_a_closed_client_says_so_and_lets_cancel_pass() -> None:
    with background(one_chunk_and_no_end) as (_, address):
        client = Client.connect(address)
        generation = client.generate("hello")
        client.close()
        generation.cancel()
        with pytest.raises(Cancelled, match="the client is closed"):
            client.generate("hello")
        with pytest.raises(Cancelled):
            generation.text()


def test_threads_share_a_client() -> None:
    with background() as (_, address), Client.connect(address) as client:
        texts: list[str] = []
        threads = [
            threading.Thread(target=lambda: texts.append(client.chat("hello").text())) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GUARD_S)
        assert texts == ["one two"] * 8


def test_a_synchronous_deadline_is_a_typed_error() -> None:
    with (
        background(one_chunk_and_no_end) as (_, address),
        Client.connect(address, lazy=True) as client,
        pytest.raises(DeadlineExceeded),
    ):
        client.generate("hello", timeout_s=0.1).text()


def test_a_synchronous_client_closes_once_and_leaves_no_thread() -> None:
    with background() as (_, address):
        client = Client.connect(address)
        client.close()
        client.close()
        with pytest.raises(Unavailable):
            Client.connect("127.0.0.1:1", timeout_s=0.2)
    assert not any(thread.name == "baton-client" for thread in threading.enumerate())


def test_a_fork_is_told_at_once_that_it_has_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played: gRPC, whose server is in this process too, does not bear every fork."""
    with background() as (scripted, address), Client.connect(address) as client:
        generation = client.generate("hello")
        with monkeypatch.context() as fork:
            fork.setattr(os, "getpid", lambda: 1)
            for call in (lambda: client.generate("hello"), client.list_models, generation.text):
                with pytest.raises(RuntimeError, match="does not survive a fork; connect in the child"):
                    call()
            # Nothing is there to be closed.
            client.close()
        assert generation.text() == "one two"
        assert len(scripted.requests) == 1


async def test_a_fork_of_an_asynchronous_client_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (_, server), await AsyncClient.connect(server.address) as client:
        with monkeypatch.context() as fork:
            fork.setattr(os, "getpid", lambda: 1)
            with pytest.raises(RuntimeError, match="does not survive a fork; connect in the child"):
                client.generate("hello")
        assert await client.generate("hello").text() == "one two"
