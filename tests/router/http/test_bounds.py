"""What is wrong with a body costs no more than what is right with it, and does not hold up the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import ValidationError

from baton.errors import InvalidRequest
from router.http import generating, tokens
from router.http.bodies import INLINE_BYTES, Bodies
from router.http.schema import Body
from router.http.schema_chat import ChatBody
from router.http.schema_completions import CompletionBody
from router.http.schema_tokens import DetokenizeBody, TokenizeBody
from router.http.validation import MAX_MARKS, read
from tests.router.http.scripted import chunk, scripted, summary

ResultT = TypeVar("ResultT")
BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)


def models(base: type[Body] = Body) -> Iterator[type[Body]]:
    """All objects that may be in a body."""
    for model in base.__subclasses__():
        yield model
        yield from models(model)


def hostile() -> Iterator[Any]:
    """Long lists and objects, of which each entry may be wrong."""
    for entry in ({}, [], "x", 0, -1, None, {"x": 1}, {"type": "text", "x": 1}, [[]]):
        yield [entry] * 3000
        yield {f"a{number}": entry for number in range(3000)}
        yield {str(number): entry for number in range(3000)}


def num_faults(model: type[Body], body: Any) -> int:
    try:
        model.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("model", [*models()], ids=lambda model: model.__name__)
def test_every_field_is_left_after_a_few_faults(model: type[Body]) -> None:
    names = [field.alias or name for name, field in model.model_fields.items()]
    values = [*hostile()]
    for body in [*values[1::3], *({name: value} for name in names for value in values)]:
        assert num_faults(model, body) <= 32, [*body][:1]


def arrays(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        if node.get("type") == "array":
            yield path, node
        for name, inner in node.items():
            yield from arrays(inner, f"{path}/{name}")
    elif isinstance(node, list):
        for inner in node:
            yield from arrays(inner, path)


@pytest.mark.parametrize("model", BODIES)
def test_every_list_has_a_bound(model: type[Body]) -> None:
    found = [*arrays(model.model_json_schema())]
    assert found
    assert [path for path, node in found if "maxItems" not in node] == []


def repeated(begin: str, entry: str, end: str, *, entries: int = 400_000) -> bytes:
    return (begin + ",".join([entry] * entries) + end).encode()


def numbered(begin: str, end: str) -> bytes:
    return (begin + ",".join(f'"a{number}":1' for number in range(200_000)) + end).encode()


@pytest.mark.parametrize(
    ("model", "body", "field"),
    [
        (ChatBody, repeated('{"tools":[', "{}", "]}"), "tools[0].type"),
        (
            ChatBody,
            repeated('{"messages":[{"role":"user","content":[', "{}", "]}]}"),
            "messages[0].content[0].type",
        ),
        (
            ChatBody,
            repeated('{"messages":[', '{"role":"user","content":"a"}', "]}", entries=150_000),
            "messages",
        ),
        (CompletionBody, repeated('{"prompt":[', '"a"', "]}"), "prompt"),
        (CompletionBody, numbered("{", "}"), "a0"),
        (CompletionBody, numbered('{"logit_bias":{', "}}"), "logit_bias"),
    ],
)
def test_a_body_of_megabytes_is_refused_at_once(model: type[Body], body: bytes, field: str) -> None:
    begun = time.process_time()
    with pytest.raises(InvalidRequest) as error:
        read(model, body)
    # A tenth of it; with a walk for each fault it was seconds.
    assert time.process_time() - begun < 1
    assert error.value.field.startswith(field)


@pytest.mark.parametrize(
    "entry", ["[]", "{}", "[" * 90 + "]" * 90, '{"":0}'], ids=["lists", "objects", "nested", "names"]
)
def test_a_body_of_nothing_but_structure_is_refused_before_anything_is_made_of_it(entry: str) -> None:
    body = repeated('{"metadata":[', entry, "]}", entries=(16 << 20) // (len(entry) + 1) - 10)
    begun = time.process_time()
    with pytest.raises(InvalidRequest, match="brackets, braces and colons"):
        read(ChatBody, body)
    # Reading it would take seconds, in which no other thread runs.
    assert time.process_time() - begun < 0.5


def test_as_many_brackets_as_may_be_are_read_and_one_more_is_not() -> None:
    text = "[" * (MAX_MARKS - len("{:"))
    assert read(CompletionBody, json.dumps({"prompt": text}).encode()).prompt == text
    with pytest.raises(InvalidRequest, match=f"more than {MAX_MARKS} brackets"):
        read(CompletionBody, json.dumps({"prompt": text + "["}).encode())


async def test_long_bodies_are_read_off_the_loop_and_short_ones_on_it() -> None:
    own = threading.get_ident()

    async def offload(work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.to_thread(work)

    def where(body: bytes) -> int:
        return threading.get_ident()

    bodies = Bodies(offload)
    assert await bodies.read(b"x" * INLINE_BYTES, where) == own
    assert await bodies.read(b"x" * (INLINE_BYTES + 1), where) != own
    with pytest.raises(InvalidRequest):
        await bodies.read(b"[" + b" " * INLINE_BYTES, partial(read, ChatBody))


async def test_each_endpoint_reads_long_bodies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    async def answer(request: Any, call: Any) -> None:
        await call.write(chunk("a", end=True))
        await call.write(summary(1))

    def traced(model: Any, body: bytes) -> Any:
        threads.append(threading.get_ident())
        return read(model, body)

    monkeypatch.setattr(generating, "read", traced)
    monkeypatch.setattr(tokens, "read", traced)
    async with scripted(tmp_path, answer) as d:
        for path, body in [
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [5]}),
        ]:
            content = json.dumps(body).encode().ljust(INLINE_BYTES + 1)
            response = await d.http.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code == 200, response.text
    assert len(threads) == 4
    assert threading.get_ident() not in threads
