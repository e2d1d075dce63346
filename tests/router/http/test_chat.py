"""POST /v1/chat/completions and the token endpoints, over whole clusters and over scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from baton.errors import InvalidRequest
from baton.v1 import common_pb2
from baton.v1.inference_service_pb2 import Chunk, GenerateRequest, GenerateResponse, PromptLogprobsChunk
from router.http.chat_requests import chat
from router.http.schema_chat import ChatBody
from router.http.validation import read
from router.inference import Call
from router.text import Text
from tests.fakes import expected_answer
from tests.router.http.door import KV, door, events
from tests.router.http.scripted import scripted, started, summary
from tests.router.tiny_text import BOS, at_once, byte_tokenizer, ids_of, model_dir

HI = [{"role": "user", "content": "hi"}]
# By the template of tests/router/tiny_text.py.
PROMPT = [BOS, *ids_of("user:hi;")]
HERMES = (
    "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }};"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


async def test_an_answer_in_openais_shape(tmp_path: Path) -> None:
    expected = byte_tokenizer().decode(expected_answer(PROMPT, 7, KV))
    async with door(tmp_path) as d:
        answer = (await d.chat(messages=HI, max_completion_tokens=7)).json()
        assert (answer["object"], answer["id"][:9], answer["model"]) == (
            "chat.completion",
            "chatcmpl-",
            "tiny",
        )
        message = {"role": "assistant", "content": expected, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
        assert answer["choices"] == [choice]
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)
        await d.idle()


async def test_without_a_maximum_a_chat_fills_its_context_and_a_completion_has_openais_16_tokens(
    tmp_path: Path,
) -> None:
    def num_tokens(response: httpx.Response) -> tuple[int, int]:
        usage = response.json()["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]

    async with door(tmp_path) as d:
        num_prompt_tokens, num_output_tokens = num_tokens(await d.chat(messages=HI))
        assert num_prompt_tokens + num_output_tokens == d.model.max_model_len
        assert num_tokens(await d.complete(prompt="hello"))[1] == 16
        await d.idle()
    async with door(tmp_path / "set", default_max_tokens=5) as d:
        assert num_tokens(await d.chat(messages=HI))[1] == 5
        assert num_tokens(await d.complete(prompt="hello"))[1] == 5
        await d.idle()


async def test_streamed_answers_begin_with_their_role_once_each(tmp_path: Path) -> None:
    expected = byte_tokenizer().decode(expected_answer(PROMPT, 7, KV))
    async with door(tmp_path) as d:
        streamed = events((await d.chat(messages=HI, max_tokens=7, n=2, stream=True)).text)
        for index in (0, 1):
            own = [e["choices"][0] for e in streamed[:-1] if e["choices"][0]["index"] == index]
            assert [choice["delta"].get("role") for choice in own] == ["assistant"] + [None] * (len(own) - 1)
            assert "".join(choice["delta"]["content"] for choice in own) == expected
            assert [choice["finish_reason"] for choice in own][-1] == "length"
        assert {event["object"] for event in streamed[:-1]} == {"chat.completion.chunk"}
        await d.idle()


async def test_parts_of_text_are_lines_and_developers_are_the_system(tmp_path: Path) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        # What openai's own message objects have beside.
        {
            "role": "assistant",
            "content": "c",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "tool_calls": None,
        },
    ]
    text = "system:be brief;user:a\nb;assistant:c;"
    async with door(tmp_path) as d:
        response = await d.http.post("/tokenize", json={"messages": messages})
        assert response.json()["tokens"] == [BOS, *ids_of(text)]
        answer = await d.chat(messages=messages, max_tokens=3, return_token_ids=True)
        expected = expected_answer([BOS, *ids_of(text)], 3, KV)
        assert answer.json()["choices"][0]["token_ids"] == expected
        await d.idle()


async def test_tokens_and_texts(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        body = {"prompt": "h\u00e9", "return_token_strs": True, "model": "tiny"}
        tokenized = (await d.http.post("/tokenize", json=body)).json()
        assert tokenized == {
            "count": 4,
            "max_model_len": 64,
            "tokens": [BOS, *ids_of("h\u00e9")],
            "token_strs": ["<s>", "h", "\u00c3", "\u00a9"],
        }
        back = await d.http.post("/detokenize", json={"tokens": tokenized["tokens"]})
        assert back.json() == {"prompt": "<s>h\u00e9"}
        for path, wrong, param in [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [300]}, "tokens"),
            ("/detokenize", {"tokens": [5] * 65}, "tokens"),
            ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ]:
            response = await d.http.post(path, json=wrong)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        other = await d.http.post("/tokenize", json={"prompt": "a", "model": "other"})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


def tokens(token_ids: Sequence[int], logprobs: Sequence[float], *tops: dict[int, float]) -> GenerateResponse:
    shaped = [common_pb2.TopLogprobs(token_ids=[*top], logprobs=[*top.values()]) for top in tops]
    return GenerateResponse(
        chunk=Chunk(
            token_ids=token_ids,
            text=byte_tokenizer().decode(list(token_ids)),
            logprobs=logprobs,
            top_logprobs=shaped,
            finish_reason=common_pb2.FINISH_REASON_STOP,
        )
    )


async def test_log_probabilities_are_standard_json_whatever_they_are(tmp_path: Path) -> None:
    first, second = ids_of("\u00e9")
    (letter,) = ids_of("a")
    minus = float("-inf")

    async def script(request: GenerateRequest, call: Call) -> None:
        await call.write(started())
        prompt = PromptLogprobsChunk(start_index=1, token_ids=[letter], logprobs=[minus])
        prompt.top_logprobs.add(token_ids=[letter, first], logprobs=[-0.5, float("nan")])
        await call.write(GenerateResponse(prompt_logprobs=prompt))
        tops = ({first: -0.25, letter: minus}, {second: -0.5, letter: -2.0}, {letter: minus, second: -1.0})
        await call.write(tokens([first, second, letter], [-0.25, -0.5, minus], *tops))
        await call.write(summary(3))

    async with scripted(tmp_path, script) as d:
        body = {"messages": HI, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 2}
        answer = (await d.http.post("/v1/chat/completions", json=body)).json()
        content = answer["choices"][0]["logprobs"]["content"]
        # Half of a character has bytes only; they are written as OpenAI writes them.
        assert [(e["token"], e["bytes"], e["logprob"]) for e in content] == [
            ("\\xc3", [0xC3], -0.25), ("\\xa9", [0xA9], -0.5), ("a", [0x61], -9999.0)
        ]  # fmt: skip
        assert [[top["logprob"] for top in e["top_logprobs"]] for e in content] == [
            [-0.25, -9999.0], [-0.5, -2.0], [-9999.0, -1.0]
        ]  # fmt: skip
        assert answer["prompt_logprobs"] == [
            None,
            {
                str(letter): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
                str(first): {"logprob": -9999.0, "rank": 2, "decoded_token": "\ufffd"},
            },
        ]
        body = {"prompt": "x", "logprobs": 2}
        shaped = (await d.http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        assert shaped["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "a"]
        # The character begins where its first byte does, and the letter after it.
        assert shaped["text_offset"] == [0, 0, 1]
        assert shaped["top_logprobs"][0] == {"bytes:\\xc3": -0.25, "a": -9999.0}


def say(*texts: str) -> Any:
    async def script(request: GenerateRequest, call: Call) -> None:
        await call.write(started())
        for number, text in enumerate(texts):
            is_last = number == len(texts) - 1
            reason = common_pb2.FINISH_REASON_STOP if is_last else common_pb2.FINISH_REASON_UNSPECIFIED
            await call.write(GenerateResponse(chunk=Chunk(token_ids=[9], text=text, finish_reason=reason)))
        await call.write(summary(len(texts)))

    return script


def hermes(folder: Path) -> Any:
    return model_dir(folder / "hermes", template=HERMES)


async def test_a_call_of_a_tool_whole_and_streamed(tmp_path: Path) -> None:
    pieces = ["Let me ", "see. <tool", CALL[5:20], CALL[20:], ""]
    async with scripted(tmp_path, say(*pieces), model=hermes(tmp_path)) as d:
        body = {"messages": HI, "tools": [WEATHER]}
        (choice,) = (await d.http.post("/v1/chat/completions", json=body)).json()["choices"]
        message = choice["message"]
        (call,) = message["tool_calls"]
        assert (choice["finish_reason"], message["content"].strip()) == ("tool_calls", "Let me see.")
        assert (call["type"], call["function"]["name"]) == ("function", "weather")
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
        assert call["id"]

        streamed = events((await d.http.post("/v1/chat/completions", json={**body, "stream": True})).text)
        choices = [event["choices"][0] for event in streamed[:-1]]
        parts = [part for c in choices for part in c["delta"].get("tool_calls", ())]
        # One entry per call in an event: clients take a second one for another call.
        assert [(part["index"], part["function"]["name"]) for part in parts] == [(0, "weather")]
        assert parts[0]["id"]
        assert json.loads(parts[0]["function"]["arguments"]) == {"city": "Oslo"}
        assert "".join(c["delta"].get("content") or "" for c in choices).strip() == "Let me see."
        reasons = [c["finish_reason"] for c in choices]
        assert (reasons[-1], set(reasons[:-1])) == ("tool_calls", {None})


@pytest.mark.parametrize("logprobs", [True, False])
async def test_tokens_of_a_call_come_with_the_call(logprobs: bool, tmp_path: Path) -> None:
    text = f"Well. {CALL}{CALL} and on <tool"

    async def script(request: GenerateRequest, call: Call) -> None:
        await call.write(started())
        for number, char in enumerate(text):
            own = [-number / 8] if logprobs else []
            reason = 1 if number == len(text) - 1 else 0
            chunk = Chunk(token_ids=[number + 2], text=char, logprobs=own, finish_reason=reason)
            await call.write(GenerateResponse(chunk=chunk))
        await call.write(summary(len(text)))

    async with scripted(tmp_path, script, model=hermes(tmp_path)) as d:
        body = {"messages": HI, "tools": [WEATHER], "stream": True, "return_token_ids": True}
        response = await d.http.post("/v1/chat/completions", json={**body, "logprobs": logprobs})
        choices = [event["choices"][0] for event in events(response.text)[:-1]]
        assert [i for choice in choices for i in choice["token_ids"]] == [*range(2, len(text) + 2)]
        # What may still become a call says nothing.
        assert len(choices) < len(text) / 2
        if logprobs:
            told = [e["logprob"] for choice in choices for e in choice["logprobs"]["content"]]
            assert told == [-number / 8 for number in range(len(text))]


async def test_calls_that_end_with_one_token_are_one_entry_each(tmp_path: Path) -> None:
    async with scripted(tmp_path, say(CALL + CALL), model=hermes(tmp_path)) as d:
        body = {"messages": HI, "tools": [WEATHER], "stream": True}
        response = await d.http.post("/v1/chat/completions", json=body)
        state = ChatCompletionStreamState()
        for event in events(response.text)[:-1]:
            indices = [part["index"] for part in event["choices"][0]["delta"].get("tool_calls", ())]
            assert len(set(indices)) == len(indices)
            [*state.handle_chunk(ChatCompletionChunk.model_validate(event))]
        calls = state.get_final_completion().choices[0].message.tool_calls
        assert calls is not None
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Oslo"}] * 2
        assert len({call.id for call in calls}) == 2


async def test_without_tools_or_with_none_a_call_is_text(tmp_path: Path) -> None:
    async with scripted(tmp_path, say(CALL), model=hermes(tmp_path)) as d:
        for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}):
            response = await d.http.post("/v1/chat/completions", json={"messages": HI, **body})
            (choice,) = response.json()["choices"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", CALL)
            assert "tool_calls" not in choice["message"]


def asked(folder: Path, **body: Any) -> Any:
    """The request that a body becomes, at a model that writes calls as Hermes does."""
    text = Text(hermes(folder), at_once)
    parsed = read(ChatBody, json.dumps({"messages": HI, **body}).encode())
    return chat(parsed, "r", text.tool_format)


def test_tools_and_earlier_calls_reach_the_contract(tmp_path: Path) -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    ]
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    made = asked(tmp_path, messages=messages, tools=[WEATHER], chat_template_kwargs={"thinking": False})
    (request,) = made.requests
    shown = {"type": "function", "function": {k: v for k, v in WEATHER["function"].items() if k != "strict"}}
    assert [json.loads(tool) for tool in request.chat.tools] == [shown]
    assert json.loads(request.chat.template_arguments) == {"thinking": False}
    _, assistant, tool = request.chat.messages
    assert [(c.id, c.name, json.loads(c.arguments)) for c in assistant.tool_calls] == [
        ("c1", "weather", {"city": "Oslo"})
    ]
    assert (assistant.content, tool.role, tool.content, tool.tool_call_id) == ("", "tool", "rain", "c1")
    assert made.functions == ("weather",)
    assert not request.HasField("grammar")


def test_an_answer_that_must_match_something_cannot_be_a_call(tmp_path: Path) -> None:
    for number, (body, field) in enumerate(
        [
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"guided_regex": "a"}, "guided_regex"),
            ({"structured_outputs": {"choice": ["a"]}, "tool_choice": "auto"}, "structured_outputs.choice"),
        ]
    ):
        with pytest.raises(InvalidRequest, match="set tool_choice to none") as error:
            asked(tmp_path / str(number), tools=[WEATHER], **body)
        assert error.value.field == field
        free = asked(tmp_path / f"{number} free", tools=[WEATHER], **body | {"tool_choice": "none"})
        assert (free.functions, free.requests[0].HasField("grammar")) == ((), True)


def test_a_forced_call_is_a_grammar(tmp_path: Path) -> None:
    for number, choice in enumerate(("required", {"type": "function", "function": {"name": "weather"}})):
        made = asked(tmp_path / str(number), tools=[WEATHER], tool_choice=choice)
        assert "weather" in made.requests[0].grammar.lark
        assert made.functions == ("weather",)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    with pytest.raises(InvalidRequest) as error:
        asked(tmp_path / "a", tools=[WEATHER], tool_choice="required", response_format=schema)
    assert error.value.field == "tool_choice"


async def test_a_model_whose_template_knows_no_tools_refuses_them(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        for body, param in [
            ({"tools": [WEATHER]}, "tools"),
            ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ]:
            response = await d.chat(messages=HI, **body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        await d.idle()
