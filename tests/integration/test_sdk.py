"""The SDK with a real cluster: answers as values, both clients alike, refusals by type."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel
from transformers import LlamaForCausalLM

from baton import AsyncClient, Client
from baton.cluster.local_cluster import LocalCluster
from baton.errors import IncompleteAnswer, InvalidRequest, UnknownModel
from tests.integration.oracle import assert_greedy

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [(7 * i) % 250 + 3 for i in range(40)]


class Verdict(BaseModel):
    """Small, so that a model that knows nothing fills it within few tokens."""

    is_true: bool
    colour: Literal["red", "green"]


async def test_a_model_that_knows_nothing_fills_in_a_class(tiny_client: AsyncClient) -> None:
    for seed in range(3):
        verdict = await tiny_client.parse(
            Verdict, token_ids=PROMPT, max_tokens=400, seed=seed, truncate_prompt_tokens=20
        )
        assert isinstance(verdict, Verdict)
        assert verdict.colour in ("red", "green")
    with pytest.raises(IncompleteAnswer) as error:
        await tiny_client.parse(Verdict, token_ids=PROMPT, max_tokens=2, seed=0)
    assert error.value.field == "max_tokens"
    assert error.value.text.lstrip().startswith("{")
    assert error.value.request_id.startswith("req-")


async def test_both_clients_get_transformers_tokens(
    tiny_cluster: LocalCluster, tiny_client: AsyncClient, tiny_model: tuple[Path, LlamaForCausalLM]
) -> None:
    options = {"token_ids": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def without_a_loop() -> list[int]:
        with Client.connect(tiny_cluster.address, lazy=True) as client:
            return [token for chunk in client.generate(**options) for token in chunk.token_ids]

    (answer,) = await tiny_client.generate(**options).answers()
    assert_greedy(tiny_model[1], PROMPT, list(answer.token_ids))
    assert await asyncio.to_thread(without_a_loop) == list(answer.token_ids)


async def test_what_the_router_refuses_is_typed_and_asked_once(tiny_client: AsyncClient) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(InvalidRequest) as error:
            await tiny_client.generate("hello", top_p=7.0).text()
        with pytest.raises(UnknownModel):
            await tiny_client.generate("hello", model="nobody").text()
    assert error.value.field == "top_p"
