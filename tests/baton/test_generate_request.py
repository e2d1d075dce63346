"""What the SDK sends, and what it refuses to send: by field, with what that field takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton import AsyncClient, Grammar, SamplingParams
from baton.errors import InvalidRequest
from baton.generate_request import build_request
from baton.v1 import common_pb2


def built(prompt: Any = "a", messages: Any = None, token_ids: Any = None, **options: Any) -> Any:
    return build_request(prompt, messages, token_ids, options)


@pytest.mark.parametrize(
    ("given", "field", "allowed"),
    [
        ({"prompt": 7}, "prompt", "text"),
        ({"prompt": None, "token_ids": [-1]}, "token_ids", r"from 0 to 2\*\*32 - 1"),
        ({"max_tokens": 2**40}, "max_tokens", r"below 2\*\*31"),
        ({"temperature": "warm"}, "temperature", "a number"),
        ({"temperature": 10**400}, "temperature", "a number"),
        ({"stop": [1]}, "stop", "a text or a sequence of texts"),
        ({"stop_token_ids": 3}, "stop_token_ids", "a sequence, each a whole number"),
        ({"logit_bias": [1]}, "logit_bias", "a mapping from token ids to numbers"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias", "a mapping from token ids to numbers"),
        ({"grammar": "[a-z]"}, "grammar", "a baton.Grammar"),
        ({"prompt": [1, 2, 3]}, "prompt", r"text \(ids of tokens go to token_ids="),
        ({"priority": "urgent"}, "priority", "one of low, normal, high"),
        ({"priority": 3}, "priority", "one of low, normal, high"),
        ({"priority": ["low"]}, "priority", "one of low, normal, high"),
        ({"ttft_objective_ms": "soon"}, "ttft_objective_ms", "a number"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_a_field_cannot_hold_is_refused_with_what_it_holds(
    given: dict[str, Any], field: str, allowed: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} cannot be sent: it must be .*{allowed}") as error:
        built(**given)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("prompt", "messages", "given"),
    [(None, None, "none"), ("a", [], "prompt, messages")],
    ids=["none", "two"],
)
def test_there_is_one_prompt(prompt: Any, messages: Any, given: str) -> None:
    expected = f"exactly one of prompt, messages, token_ids; given: {given}$"
    with pytest.raises(InvalidRequest, match=expected) as error:
        built(prompt, messages)
    assert error.value.field == "prompt"


def test_a_conversation_without_messages_is_one_all_the_same() -> None:
    """It is the router's to refuse; it must not look like no prompt at all."""
    assert built(None, []).HasField("chat")


def test_tools_belong_to_conversations() -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    sent = built(None, [{"role": "user", "content": "a"}], tools=[tool], template_arguments={"b": 1}).chat
    assert [json.loads(text) for text in sent.tools] == [tool]
    assert json.loads(sent.template_arguments) == {"b": 1}
    with pytest.raises(InvalidRequest, match="give messages, not prompt") as error:
        built(tools=[tool])
    assert error.value.field == "tools"


def test_what_is_larger_than_a_message_may_be_is_refused_with_the_limit() -> None:
    """16 MiB, less the key and the length of a field: a byte, and the 4 of a varint up to 2**28."""
    limit = 16 * 1024 * 1024
    assert built("x" * (limit - 5)).ByteSize() == limit
    with pytest.raises(
        InvalidRequest, match=f"takes {limit + 1} bytes; at most {limit} can be sent"
    ) as error:
        built("x" * (limit - 4))
    assert error.value.field == "prompt"
    # A long prompt as token ids is far below it: at most 3 bytes for an id below 2**21.
    assert built(None, token_ids=[2**21 - 1] * 200_000).ByteSize() < 601_000


@pytest.mark.parametrize(
    ("name", "priority"),
    [
        ("low", common_pb2.PRIORITY_LOW),
        ("normal", common_pb2.PRIORITY_NORMAL),
        ("high", common_pb2.PRIORITY_HIGH),
        (None, common_pb2.PRIORITY_UNSPECIFIED),
    ],
)
def test_a_priority_is_sent_by_its_name(name: str | None, priority: int) -> None:
    assert built(priority=name).priority == priority


def test_an_objective_is_sent_only_if_there_is_one() -> None:
    assert built(ttft_objective_ms=0.5).ttft_objective_ms == 0.5
    assert not built().HasField("ttft_objective_ms")


def test_a_schema_may_be_a_mapping() -> None:
    schema = {"type": "object", "properties": {"ä": {"type": "integer"}}}
    sent = built(grammar=Grammar(kind="json_schema", source=schema)).grammar.json_schema  # type: ignore[arg-type]
    assert json.loads(sent) == schema


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"kind": "choice"}, "needs choices, and no source"),
        ({"kind": "choice", "choices": ("a",), "source": "b"}, "needs choices, and no source"),
        ({"kind": "regex"}, "needs source, and no choices"),
        ({"kind": "regex", "source": 5}, "source must be text"),
        ({"kind": "regex", "source": {"type": "object"}}, "only a JSON schema may be a mapping"),
        ({"kind": "json_schema", "source": {"enum": {1}}}, "cannot be written as JSON"),
        ({"kind": "choice", "choices": (5,)}, "choices must be a sequence of texts"),
        ({"kind": "choice", "choices": "yes"}, "choices must be a sequence of texts"),
        ({"kind": "choice", "choices": 5}, "choices must be a sequence of texts"),
    ],
)
def test_a_grammar_says_what_it_needs(fields: Any, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what) as error:
        Grammar(**fields)
    assert error.value.field == "grammar"


def test_choices_may_be_a_list() -> None:
    assert Grammar(kind="choice", choices=["a", "b"]) == Grammar(kind="choice", choices=("a", "b"))


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), "a"])
async def test_a_deadline_lies_ahead(timeout_s: Any) -> None:
    client = AsyncClient.__new__(AsyncClient)
    with pytest.raises(InvalidRequest, match="above 0") as error:
        client.generate("a", timeout_s=timeout_s)
    assert error.value.field == "timeout_s"


def test_the_parameters_are_there_without_torch() -> None:
    assert SamplingParams(temperature=0).max_tokens == 128


def test_bytes_are_no_prompt() -> None:
    prompt: Any = b"abc"
    with pytest.raises(InvalidRequest, match="prompt cannot be sent: it must be text") as error:
        build_request(prompt, None, None, {})
    assert error.value.field == "prompt"


@pytest.mark.parametrize(("seed", "sent"), [(-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)])
def test_a_seed_below_zero_is_its_twos_complement(seed: int, sent: int) -> None:
    assert build_request("x", None, None, {"seed": seed}).seed == sent


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, "1"])
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    with pytest.raises(InvalidRequest, match="seed cannot be sent") as error:
        build_request("x", None, None, {"seed": seed})
    assert error.value.field == "seed"
