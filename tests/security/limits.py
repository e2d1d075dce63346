"""Every bound that a field of a request can pass: its value, and requests with as much as one likes of it.

Owns the table that tests/security/test_limits.py sends through both doors, and that docs/security.md lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.grammars import MAX_SCHEMA_DEPTH
from baton.sampling import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)
from baton.v1.common_pb2 import Choices, Grammar
from baton.v1.inference_service_pb2 import Chat, ChatMessage, GenerateRequest, TokenIds, ToolCall
from router.conversation import MAX_CALLS, MAX_MESSAGES
from router.http.schema_chat import MAX_PARTS
from router.http.schema_completions import MAX_PROMPTS
from router.http.validation import MAX_MARKS
from router.request import MAX_ANSWERS, MAX_CACHE_SALT_CHARS, MAX_REQUEST_ID_CHARS
from router.stops import MAX_STOP_CHARS, MAX_STOPS
from router.tools import MAX_DEPTH, MAX_TOOLS
from tests.router.tiny_text import MAX_MODEL_LEN

# Takes whatever a chat may have, and says little of it.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if loop.last %}{{ m.role }}{% endif %}"
    "{% if m.tool_calls %}{% endif %}{% endfor %}{% if tools or anything %}t{% endif %}"
)

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a request may have at most.

    name: as docs/security.md has it.
    most: the bound.
    field: of the error over HTTP; over gRPC too, unless grpc_field differs.
    http: a body with so much of it, and the path; None where HTTP has no such field.
    grpc: a message with so much of it; None where gRPC has no such field.
    served: whether the tiny model answers a request at its bound. Else something else refuses it.
    """

    name: str
    most: int
    field: str
    http: Callable[[int], Body] | None = None
    grpc: Callable[[int], GenerateRequest] | None = None
    grpc_field: str = ""
    served: bool = True


def completion(**fields: Any) -> Body:
    return {"prompt": "hi", "max_tokens": 1, **fields}


def chat(**fields: Any) -> Body:
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}


def text(**fields: Any) -> GenerateRequest:
    return GenerateRequest(text="hi", max_tokens=1, **fields)


def conversation(**fields: Any) -> GenerateRequest:
    fields.setdefault("messages", [ChatMessage(role="user", content="x")])
    return GenerateRequest(chat=Chat(**fields), max_tokens=1)


def called(number: int) -> Body:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    return chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call] * number}])


def nested_schema(depth: int) -> Body:
    schema: Body = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def nested_value(depth: int) -> Body:
    value: Any = 1
    for _ in range(depth - 1):
        value = [value]
    return {"anything": value}


def tools(number: int) -> list[Body]:
    return [{"type": "function", "function": {"name": f"f{index}"}} for index in range(number)]


def choices(num_chars: int) -> list[str]:
    """Texts of so many characters together."""
    return ["a" * 200] * (num_chars // 200) + ["b" * (num_chars % 200)] * (num_chars % 200 > 0)


def biases(number: int) -> dict[int, float]:
    return dict.fromkeys(range(number), 0.0)


BOUNDS = (
    Bound(
        name="answers (`n`)",
        most=MAX_ANSWERS,
        field="n",
        http=lambda k: completion(n=k),
        grpc=lambda k: text(n=k),
    ),
    Bound(
        name="likeliest tokens (`logprobs`, `top_logprobs`)",
        most=MAX_TOP_LOGPROBS,
        field="logprobs",
        http=lambda k: completion(logprobs=k),
        grpc=lambda k: text(logprobs=True, top_logprobs=k),
        grpc_field="top_logprobs",
    ),
    Bound(
        name="likeliest tokens of the prompt (`prompt_logprobs`)",
        most=MAX_TOP_LOGPROBS,
        field="prompt_logprobs",
        http=lambda k: completion(prompt_logprobs=k),
        grpc=lambda k: text(prompt_logprobs=k),
    ),
    Bound(
        name="stops (`stop`)",
        most=MAX_STOPS,
        field="stop",
        http=lambda k: completion(stop=["z"] * k),
        grpc=lambda k: text(stop=["z"] * k),
    ),
    Bound(
        name="characters of a stop",
        most=MAX_STOP_CHARS,
        field="stop",
        http=lambda k: completion(stop=["z" * k]),
        grpc=lambda k: text(stop=["z" * k]),
    ),
    Bound(
        name="ids that stop (`stop_token_ids`)",
        most=MAX_STOP_TOKEN_IDS,
        field="stop_token_ids",
        http=lambda k: completion(stop_token_ids=[7] * k),
        grpc=lambda k: text(stop_token_ids=[7] * k),
    ),
    Bound(
        name="biased ids (`logit_bias`)",
        most=MAX_LOGIT_BIAS,
        field="logit_bias",
        http=lambda k: completion(logit_bias={str(key): bias for key, bias in biases(k).items()}),
        grpc=lambda k: text(logit_bias=biases(k)),
        # The tiny model's vocabulary is smaller.
        served=False,
    ),
    Bound(
        name="characters of a grammar",
        most=MAX_GRAMMAR_CHARS,
        field="guided_choice",
        http=lambda k: completion(guided_choice=choices(k)),
        grpc=lambda k: text(grammar=Grammar(choices=Choices(texts=choices(k)))),
        grpc_field="grammar",
        # The workers here have no tokenizer.
        served=False,
    ),
    Bound(
        name="choices of a grammar",
        most=MAX_CHOICES,
        field="guided_choice",
        http=lambda k: completion(guided_choice=["a"] * k),
        grpc=lambda k: text(grammar=Grammar(choices=Choices(texts=["a"] * k))),
        grpc_field="grammar",
        served=False,
    ),
    Bound(
        name="depth of a JSON schema",
        most=MAX_SCHEMA_DEPTH,
        field="guided_json",
        http=lambda k: completion(guided_json=nested_schema(k - 1)),
        grpc=lambda k: text(grammar=Grammar(json_schema=json.dumps(nested_schema(k - 1)))),
        grpc_field="grammar",
        served=False,
    ),
    Bound(
        name="messages of a chat",
        most=MAX_MESSAGES,
        field="messages",
        http=lambda k: chat(messages=[{"role": "user", "content": "x"}] * k),
        grpc=lambda k: conversation(messages=[ChatMessage(role="user", content="x")] * k),
        grpc_field="chat",
    ),
    Bound(
        name="parts of a message",
        most=MAX_PARTS,
        field="messages[0].content",
        http=lambda k: chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * k}]),
    ),
    Bound(
        name="calls of a message (`tool_calls`)",
        most=MAX_CALLS,
        field="messages[0].tool_calls",
        http=called,
        grpc=lambda k: conversation(
            messages=[ChatMessage(role="assistant", tool_calls=[ToolCall(name="f")] * k)]
        ),
        grpc_field="chat",
    ),
    Bound(
        name="tools",
        most=MAX_TOOLS,
        field="tools",
        http=lambda k: chat(tools=tools(k)),
        # Short ones, which are none: that many real ones are longer than the tiny model's context.
        grpc=lambda k: conversation(tools=["{}"] * k),
        served=False,
    ),
    Bound(
        name="depth of a template's arguments, and of a tool",
        most=MAX_DEPTH,
        field="chat_template_kwargs",
        http=lambda k: chat(chat_template_kwargs=nested_value(k)),
        grpc=lambda k: conversation(template_arguments=json.dumps(nested_value(k))),
        grpc_field="template_arguments",
    ),
    Bound(
        name="prompts of a completion",
        most=MAX_PROMPTS,
        field="prompt",
        http=lambda k: completion(prompt=["x"] * k),
    ),
    Bound(
        name="characters of a request's id",
        most=MAX_REQUEST_ID_CHARS,
        field="request_id",
        grpc=lambda k: text(request_id="r" * k),
    ),
    Bound(
        name="characters of `cache_salt`",
        most=MAX_CACHE_SALT_CHARS,
        field="cache_salt",
        http=lambda k: completion(cache_salt="s" * k),
        grpc=lambda k: text(cache_salt="s" * k),
    ),
    Bound(
        name="brackets, braces and colons of a body",
        most=MAX_MARKS,
        # No field's in particular.
        field="",
        http=lambda k: completion(metadata="[" * (k - len("{:::"))),
    ),
)
# Of the model, and so of no page.
CONTEXT = Bound(
    name="tokens of a prompt",
    most=MAX_MODEL_LEN - 1,
    field="prompt",
    http=lambda k: completion(prompt=[7] * k),
    grpc=lambda k: GenerateRequest(token_ids=TokenIds(ids=[7] * k), max_tokens=1),
)
