"""What clients say and what they prove themselves with is nowhere but in requests and answers.

Each kind of secret is a word of its own; requests that are served, refused and left all carry them.
Afterwards no log (level debug), span, metric, decision, explanation or command to Redis has any of the words.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
import redis.asyncio
from transformers import LlamaForCausalLM

from baton import AsyncClient
from baton.api_keys import digest_of
from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from baton.cluster.status import fetch_explain
from baton.errors import BatonError
from baton.redis_server import EmbeddedRedis
from baton.rpc import open_channel
from tests.integration.conftest import ANY_PORTS
from tests.security.test_without_a_key import called

KEY, WRONG_KEY = "canarykey" + "k" * 24, "canarywrongkey" + "w" * 24
# Every place of a request that holds what is its client's.
WORDS = {
    name: f"canary-{name}-{number}7c1d"
    for number, name in enumerate(
        ("text", "chat", "arguments", "tool", "salt", "stop", "grammar", "schema", "model", "field", "value")
    )
}
ID = "canaries-may-name-a-request"


@asynccontextmanager
async def commands(url: str) -> AsyncIterator[io.StringIO]:
    """All that Redis is told meanwhile."""
    told = io.StringIO()
    async with redis.asyncio.from_url(url) as client, client.monitor() as monitor:

        async def listen() -> None:
            async for command in monitor.listen():
                told.write(f"{command['command']}\n")

        listening = asyncio.create_task(listen())
        try:
            yield told
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening


def chat(**fields: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": WORDS["arguments"]})}}
    tool = {"type": "function", "function": {"name": "f", "description": WORDS["tool"]}}
    messages = [
        {"role": "user", "content": WORDS["chat"]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    return {"messages": messages, "tools": [tool], "max_tokens": 4, **fields}


# (path, body): what is served, and what is refused for every reason there is.
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "completions",
        {"prompt": WORDS["text"], "max_tokens": 4, "cache_salt": WORDS["salt"], "stop": WORDS["stop"]},
    ),
    ("completions", {"prompt": WORDS["text"] * 200, "max_tokens": 4}),
    ("completions", {"prompt": WORDS["text"], "model": WORDS["model"]}),
    ("completions", {"prompt": WORDS["text"], WORDS["field"]: WORDS["value"]}),
    ("completions", {"prompt": WORDS["text"], "temperature": WORDS["value"]}),
    ("completions", {"prompt": WORDS["text"], "guided_regex": "(" + WORDS["grammar"]}),
    ("completions", {"prompt": WORDS["text"], "guided_choice": [WORDS["grammar"]], "max_tokens": 30}),
    ("completions", {"prompt": WORDS["text"], "guided_json": {"type": WORDS["schema"]}}),
    ("chat/completions", {"messages": [{"role": "user", "content": WORDS["chat"]}], "max_tokens": 4}),
    ("chat/completions", {"messages": [{"role": WORDS["chat"], "content": WORDS["chat"]}]}),
    ("chat/completions", chat()),
    ("chat/completions", chat(tools=None)),
]


async def ask(cluster: LocalCluster) -> tuple[set[int], str]:
    """Sends everything through both doors; the statuses over HTTP, and an answer's text."""
    url = cluster.http_urls[0]
    statuses = set()
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
        for path, body in BODIES:
            statuses.add((await http.post(f"{url}/{path}", json=body)).status_code)
        wrong = await http.get(f"{url}/models", headers={"authorization": f"Bearer {WRONG_KEY}"})
        statuses.add(wrong.status_code)

    async with await AsyncClient.connect(cluster.address, api_key=KEY) as client:
        answer = await client.generate(
            WORDS["text"], request_id=ID, max_tokens=40, temperature=0, ignore_eos=True
        ).text()
        left = client.generate(WORDS["text"], max_tokens=1500, ignore_eos=True)
        await anext(aiter(left))
        left.cancel()
        with pytest.raises(BatonError):
            await client.generate(WORDS["text"], model=WORDS["model"]).text()
    return statuses, answer


async def pages(cluster: LocalCluster) -> str:
    """What operators and collectors are told."""
    async with httpx.AsyncClient() as http:
        url = cluster.http_urls[0].removesuffix("/v1") + "/metrics"
        metrics = await http.get(url, headers={"authorization": f"Bearer {KEY}"})
    explained = await fetch_explain(ID, cluster.admin_address)
    return f"{metrics.text}\n{explained}\n{await cluster.status()}"


def config(model: Path, folder: Path, redis_url: str) -> ClusterConfig:
    return ClusterConfig(
        model=str(model),
        dtype="float32",
        kv_cache_bytes=16 << 20,
        threads=1,
        ray=False,
        placement="disaggregated",
        log_level="debug",
        log_dir=str(folder / "logs"),
        trace_file=str(folder / "spans.jsonl"),
        redis_url=redis_url,
        **ANY_PORTS,
    )


async def test_no_word_of_a_client_is_anywhere_else(
    tiny_model: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    tenants, settings = tmp_path / "tenants.toml", tmp_path / "baton.toml"
    tenants.write_text(f'[tenants.search]\nkeys = ["{digest_of(KEY)}"]\nrequests_per_minute = 1000\n')
    settings.write_text(
        f'[router]\ntenants_file = "{tenants}"\ndecision_log = "{tmp_path / "decisions.jsonl"}"\n'
    )
    async with (
        EmbeddedRedis() as server,
        commands(server.url) as told,
        await LocalCluster.start(
            config(tiny_model[0], tmp_path, server.url), config_file=str(settings)
        ) as cluster,
    ):
        statuses, answer = await ask(cluster)
        assert {200, 400, 401, 404} <= statuses
        async with open_channel(cluster.address) as channel:
            # With tenants nobody is told which methods there are.
            listed = await called(
                channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", []
            )
            assert listed is grpc.StatusCode.UNIMPLEMENTED
        found = {"pages": await pages(cluster)}
    found |= {"redis": told.getvalue()}
    found |= {log.name: log.read_text() for log in (tmp_path / "logs").iterdir()}
    found |= {name: (tmp_path / name).read_text() for name in ("spans.jsonl", "decisions.jsonl")}
    # All of it was there to be looked at.
    assert {"router-0.log", "prefill-0.log", "decode-0.log"} <= found.keys()
    assert ID in found["pages"]
    assert ID in found["spans.jsonl"]
    assert "# TYPE baton_" in found["pages"]
    assert "baton:worker:" in found["redis"]
    secrets = [*WORDS.values(), KEY, WRONG_KEY, answer[:12], digest_of(KEY).partition(":")[2]]
    assert [(name, word) for name, text in found.items() for word in secrets if word in text] == []
