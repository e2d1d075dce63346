"""Bad input is answered with an error that names the field, and the next request works."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton import AsyncClient
from baton.cluster.local_cluster import LocalCluster
from baton.errors import InvalidRequest, UnknownModel
from tests.integration.ledgers import ledgers

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty-text": ({"prompt": ""}, "prompt"),
    "no-prompt": ({}, "prompt"),
    "text-and-ids": ({"prompt": "hi", "token_ids": [3]}, "prompt"),
    "empty-ids": ({"token_ids": []}, "prompt"),
    "empty-chat": ({"messages": []}, "chat"),
    "a-million-tokens": ({"token_ids": [3] * 10**6}, "prompt"),
    "a-very-long-text": ({"prompt": "word " * 10**6}, "prompt"),
    "negative-temperature": ({"prompt": "hi", "temperature": -0.1}, "temperature"),
    "nan-temperature": ({"prompt": "hi", "temperature": math.nan}, "temperature"),
    "infinite-temperature": ({"prompt": "hi", "temperature": math.inf}, "temperature"),
    "top-p-zero": ({"prompt": "hi", "top_p": 0.0}, "top_p"),
    "nan-min-p": ({"prompt": "hi", "min_p": math.nan}, "min_p"),
    "negative-top-k": ({"prompt": "hi", "top_k": -1}, "top_k"),
    "max-tokens-zero": ({"prompt": "hi", "max_tokens": 0}, "max_tokens"),
    "max-tokens-negative": ({"prompt": "hi", "max_tokens": -5}, "max_tokens"),
    "max-tokens-above": ({"prompt": "hi", "max_tokens": 2047}, "max_tokens"),
    "id-outside": ({"token_ids": [3, 259]}, "token_ids"),
    "id-negative": ({"token_ids": [-1]}, "token_ids"),
    "stop-id-outside": ({"prompt": "hi", "stop_token_ids": [10**6]}, "stop_token_ids"),
    "unknown-option": ({"prompt": "hi", "temprature": 1.0}, "temprature"),
    "lone-surrogate": ({"prompt": "\ud800"}, "prompt"),
}


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(("options", "field"), BAD.values(), ids=BAD)
async def test_the_error_names_the_field(
    tiny_client: AsyncClient, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await tiny_client.generate(options.get("prompt"), **_without_prompt(options), timeout_s=20).text()
    assert caught.value.field == field
    assert not caught.value.retryable


@pytest.mark.asyncio(loop_scope="session")
async def test_an_unknown_model_is_named(tiny_client: AsyncClient) -> None:
    with pytest.raises(UnknownModel, match="gpt-17") as caught:
        await tiny_client.generate("hi", model="gpt-17").text()
    assert caught.value.field == "model"


@pytest.mark.asyncio(loop_scope="session")
async def test_nothing_is_left_and_the_next_request_works(
    tiny_cluster: LocalCluster, tiny_client: AsyncClient
) -> None:
    held = {name: counts for name, counts in (await ledgers(tiny_cluster)).items() if any(counts.values())}
    assert held == {}
    generation = tiny_client.generate("hello", max_tokens=1)
    await generation.text()
    assert generation.summary.num_output_tokens == 1
    assert (await tiny_client.list_models())[0].name == "tiny"


def _without_prompt(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "prompt"}
