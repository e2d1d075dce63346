"""OpenAI's own clients against a real cluster of the tiny fp32 model, whose template takes tools."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from baton import AsyncClient
from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from benchmarks.tiny_llama import TEMPLATE
from tests.integration.conftest import ANY_PORTS
from tests.integration.oracle import greedy

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "with-tools"
PROMPT = list(range(40, 90))
# In the manner of Hermes: calls stand between markers, which here are plain text.
TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(
    tiny_model: tuple[Path, LlamaForCausalLM], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("models") / MODEL
    shutil.copytree(tiny_model[0], folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE + TOOLS)
    config = ClusterConfig(
        model=str(folder), dtype="float32", kv_cache_bytes=16 << 20, ray=False, **ANY_PORTS
    )
    async with await LocalCluster.start(config) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def client(cluster: LocalCluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=cluster.http_urls[0], api_key="none", max_retries=0) as client:
        yield client


async def test_greedy_tokens_are_those_of_the_grpc_door_and_of_transformers(
    cluster: LocalCluster, client: AsyncOpenAI, tiny_model: tuple[Path, LlamaForCausalLM]
) -> None:
    (expected,) = greedy(tiny_model[1], [PROMPT], 16)
    text = Tokenizer.from_file(str(tiny_model[0] / "tokenizer.json")).decode(expected)
    options: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    extra = {"ignore_eos": True, "return_token_ids": True}
    whole = await client.completions.create(**options, extra_body=extra)
    (choice,) = whole.choices
    assert (choice.token_ids, choice.text) == (expected, text)  # type: ignore[attr-defined]

    ids, pieces = [], []
    async for part in await client.completions.create(**options, extra_body=extra, stream=True):
        ids += part.choices[0].token_ids
        pieces.append(part.choices[0].text)
    assert (ids, "".join(pieces)) == (expected, text)
    assert len(pieces) > 1

    async with await AsyncClient.connect(cluster.address) as own:
        generation = own.generate(token_ids=PROMPT, max_tokens=16, temperature=0, ignore_eos=True)
        (answer,) = await generation.answers()
    assert (list(answer.token_ids), answer.text) == (expected, text)


async def test_log_probabilities_are_transformers_own(
    client: AsyncOpenAI, tiny_model: tuple[Path, LlamaForCausalLM]
) -> None:
    whole = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=3,
        extra_body={"ignore_eos": True, "return_token_ids": True, "prompt_logprobs": 1},
    )  # fmt: skip
    (choice,) = whole.choices
    ids = choice.token_ids  # type: ignore[attr-defined]
    with torch.no_grad():
        logits = tiny_model[1](torch.tensor([PROMPT + ids])).logits[0]
    expected = logits.log_softmax(-1)
    shown = choice.logprobs
    assert shown is not None
    assert shown.token_logprobs is not None
    assert shown.top_logprobs is not None
    for place, token_id in enumerate(ids):
        row = expected[len(PROMPT) - 1 + place]
        assert math.isclose(shown.token_logprobs[place], float(row[token_id]), abs_tol=1e-4)
        best = sorted(shown.top_logprobs[place].values(), reverse=True)
        assert best[:3] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    prompt = choice.prompt_logprobs  # type: ignore[attr-defined]
    assert prompt[0] is None
    found = [entry[str(token_id)]["logprob"] for entry, token_id in zip(prompt[1:], PROMPT[1:], strict=True)]
    rows = torch.arange(len(PROMPT) - 1)
    assert found == pytest.approx(expected[rows, torch.tensor(PROMPT[1:])].tolist(), abs=1e-4)


async def test_the_synchronous_client_chats_and_streams(cluster: LocalCluster) -> None:
    def talk() -> None:
        with OpenAI(base_url=cluster.http_urls[0], api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == [MODEL]
            assert client.models.retrieve(MODEL).id == MODEL
            options: Any = {"model": MODEL, "messages": HI, "seed": 3, "n": 2, "max_completion_tokens": 12}
            whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
            assert [choice.index for choice in whole.choices] == [0, 1]
            assert whole.usage is not None
            assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
            streamed = client.chat.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
            texts, usages = {0: "", 1: ""}, []
            for part in streamed:
                for choice in part.choices:
                    texts[choice.index] += choice.delta.content or ""
                if part.usage is not None:
                    usages.append((part.choices, part.usage))
            assert [*texts.values()] == [choice.message.content for choice in whole.choices]
            ((choices, usage),) = usages
            assert choices == []
            counts = (usage.prompt_tokens, usage.completion_tokens)
            assert counts == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
            for choice in whole.choices:
                assert choice.logprobs is not None
                assert choice.logprobs.content is not None
                text = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
                # The token that ends an answer is one of its tokens, and no part of its text.
                shown = text.decode("utf-8", "replace").removesuffix("<|end|>")
                assert choice.message.content == shown
                assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)

    await asyncio.to_thread(talk)


class Ticket(BaseModel):
    kind: Literal["bug", "wish"]
    urgent: bool


async def test_structured_output_becomes_an_object(client: AsyncOpenAI) -> None:
    parsed = await client.chat.completions.parse(
        model=MODEL, messages=HI, response_format=Ticket, max_completion_tokens=300, seed=1
    )
    assert isinstance(parsed.choices[0].message.parsed, Ticket)
    chosen = await client.completions.create(
        model=MODEL, prompt="x", max_tokens=20, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert chosen.choices[0].text in ("yes", "no")
    number = await client.completions.create(
        model=MODEL, prompt="x", max_tokens=20, extra_body={"structured_outputs": {"regex": "[0-9]{3}"}}
    )
    assert number.choices[0].text.isdecimal()
    assert len(number.choices[0].text) == 3


async def test_a_forced_call_is_read_by_the_client_whole_and_streamed(client: AsyncOpenAI) -> None:
    options: Any = {
        "model": MODEL,
        "messages": HI,
        "tools": [WEATHER],
        "max_completion_tokens": 300,
        "seed": 1,
    }
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        whole = await client.chat.completions.create(**options, tool_choice=choice, parallel_tool_calls=False)
        (call,) = whole.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        assert whole.choices[0].finish_reason == "tool_calls"
    async with client.chat.completions.stream(
        **options, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    # And the conversation goes on with what it brought.
    message = whole.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    after = await client.chat.completions.create(
        model=MODEL, messages=[*HI, message, result], tools=[WEATHER], max_completion_tokens=3
    )
    assert after.choices[0].finish_reason in ("length", "stop")


async def test_errors_are_the_clients_own_kinds(cluster: LocalCluster, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=HI)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model=MODEL, messages=HI, temperature=-1)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    part: Any = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError) as image:
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part]}])
    assert image.value.param == "messages[0].content[0]"
    with pytest.raises(openai.InternalServerError) as late:
        await client.completions.create(
            model=MODEL, prompt="x", max_tokens=1900, extra_body={"ignore_eos": True},
            extra_headers={"x-request-timeout-s": "0.05"},
        )  # fmt: skip
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")


async def test_a_stream_that_is_left_early_leaves_nothing_behind(
    cluster: LocalCluster, client: AsyncOpenAI
) -> None:
    for _ in range(5):
        stream = await client.completions.create(
            model=MODEL, prompt="x", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        )
        async for _part in stream:
            break
        await stream.close()
    workers = (await cluster.status()).workers
    with suppress(TimeoutError):
        async with asyncio.timeout(5):
            while any(worker.num_attempts for worker in workers):
                await asyncio.sleep(0.05)
                workers = (await cluster.status()).workers
    assert [worker.num_attempts for worker in workers] == [0] * len(workers)
