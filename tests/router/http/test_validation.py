"""Whatever a body holds, it is a request or a refusal, never a defect."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.v1.inference_service_pb2 import GenerateRequest
from router.http.chat_requests import chat
from router.http.requests import Asked, completion
from router.http.schema_chat import ChatBody
from router.http.schema_completions import CompletionBody
from router.http.schema_tokens import DetokenizeBody, TokenizeBody
from router.http.validation import read
from router.request import PromptRequest, RequestReader
from router.tenancy.tenants import ANONYMOUS
from router.text import Text
from tests.router.tiny_text import EOS, at_once, grammar_check, model_dir

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }}{{ m.tool_call_id }};{% endfor %}"
)
TOOLS = "{{ tools }}<tool_call>{{ arguments }}</tool_call>"

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(max_size=6)
    | st.sampled_from(
        ["text", "auto", "required", "json_object", "user", "assistant", "tool", "<s>", "{}", "low"]
    )
)
NAMES = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "name",
        "arguments",
        "function",
        "parameters",
        "properties",
        "id",
        "5",
        "x",
        "json",
        "regex",
        "choice",
        "schema",
        "json_schema",
        "tool_calls",
        "tool_call_id",
        "include_usage",
        "image_url",
    ]
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
CONTENTS = st.text(max_size=8) | st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=4)})
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool"])}, optional={
        "content": CONTENTS, "tool_calls": VALUES, "tool_call_id": st.text(max_size=3), "name": VALUES,
    }), max_size=3,
)  # fmt: skip
TOOL_LISTS = st.lists(
    st.fixed_dictionaries({
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.text(max_size=4)}, optional={"parameters": VALUES}),
    }), max_size=2,
)  # fmt: skip


def bodies(model: type[Any], **likely: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies of fields that there are, with values of any kind."""
    names = [field.alias or name for name, field in model.model_fields.items()]
    some = st.dictionaries(st.sampled_from(names), VALUES, max_size=4)
    return st.builds(lambda rest, own: {**own, **rest}, some, st.fixed_dictionaries(likely))


@cache
def reader() -> tuple[RequestReader, Text]:
    model = model_dir(Path(mkdtemp()) / "tiny", template=TEMPLATE + TOOLS)
    text = Text(model, at_once)
    return (
        RequestReader(
            model="tiny",
            text=text,
            limits=model.limits,
            eos_token_ids=(EOS,),
            rng=random.Random(0),
            grammars=grammar_check(model),
        ),
        text,
    )


OutcomeT = TypeVar("OutcomeT")


def outcome(act: Callable[[], OutcomeT]) -> OutcomeT | InvalidRequest:
    """What comes of it, if that is a result or a refusal; a defect is raised."""
    try:
        return act()
    except InvalidRequest as error:
        return error


def check(asked: Asked | InvalidRequest) -> None:
    """Reads the requests as the router does."""
    if isinstance(asked, InvalidRequest):
        assert asked.message
        return
    for sent in asked.requests:
        # What travels is what another process can read.
        request = GenerateRequest.FromString(sent.SerializeToString())
        reading = reader()[0].read(
            request,
            tenant=ANONYMOUS,
            arrived_at=0.0,
            deadline_at=None,
            traceparent="",
            default_max_tokens=8,
        )
        found = outcome(partial(asyncio.run, reading))
        assert isinstance(found, PromptRequest) or isinstance(asked.renamed(found).field, str)


@settings(max_examples=100, deadline=None)
@given(bodies(ChatBody, messages=MESSAGES | VALUES, tools=TOOL_LISTS | st.none()))
def test_a_chat_is_a_request_or_a_refusal(body: dict[str, Any]) -> None:
    text = json.dumps(body).encode()
    check(outcome(lambda: chat(read(ChatBody, text), "r", reader()[1].tool_format)))


@settings(max_examples=100, deadline=None)
@given(
    bodies(CompletionBody, prompt=st.text(max_size=9) | st.lists(st.integers(0, 299), max_size=9) | VALUES)
)
def test_a_completion_is_a_request_or_a_refusal(body: dict[str, Any]) -> None:
    text = json.dumps(body).encode()
    check(outcome(lambda: completion(read(CompletionBody, text), "r")))


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_body_or_a_refusal(body: bytes) -> None:
    for model in (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody):
        assert isinstance(outcome(partial(read, model, body)), model | InvalidRequest)


def test_a_long_list_is_left_at_its_first_fault() -> None:
    body = json.dumps({"prompt": [1] * 300_000 + ["a"]}).encode()
    with pytest.raises(InvalidRequest) as error:
        read(CompletionBody, body)
    assert error.value.field == "prompt[300000]"
    assert len(error.value.message) < 200
