"""Who computes a prompt where it may be a decode worker, with real processes, and what is said of it.

Two clusters: "auto" with one worker of each role, of which only the decode worker keeps prefixes, and with
tenants; "colocated" with two decode workers. A third lives for the log of decisions alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from baton import AsyncClient
from baton.answer import Summary
from baton.api_keys import digest_of
from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from baton.cluster.status import fetch_explain
from baton.errors import Overloaded, Unauthenticated
from baton.route_explain import RouteExplain
from baton.rpc import open_channel
from baton.v1.inference_service_pb2 import ListModelsRequest
from baton.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.integration.conftest import ANY_PORTS
from tests.integration.oracle import assert_greedy

NUM_TOKENS = 24
# Around the borders of blocks; the last two are longer than what a decode worker may compute of a prompt
# that it has nothing of.
LENGTHS = (1, 15, 16, 33, 100, 129, 300, 600)
LOCAL_MAX_TOKENS = 256
BACK_WITHIN_S = 30.0
KEYS = {name: f"key-of-tenant-{name}-0123456789" for name in ("search", "mail", "trial")}
TRIAL_TOKENS_PER_MINUTE = 60
Tiny = tuple[Path, LlamaForCausalLM]


def prompt_of(length: int) -> list[int]:
    """A prompt that begins like none of another length."""
    rng = random.Random(length)
    return [rng.randrange(3, 259) for _ in range(length)]


def config(model: Path, placement: str, **settings: Any) -> ClusterConfig:
    return ClusterConfig(
        model=str(model),
        dtype="float32",
        kv_cache_bytes=16 << 20,
        threads=1,
        ray=False,
        placement=placement,
        **settings,
        **ANY_PORTS,
    )


def tenants_file(folder: Path) -> Path:
    """A file with three tenants, of whom one has little to spend."""
    path = folder / "tenants.toml"
    path.write_text(
        "".join(f'[tenants.{name}]\nkeys = ["{digest_of(key)}"]\n' for name, key in KEYS.items())
        # The last table is that of the trial.
        + f"tokens_per_minute = {TRIAL_TOKENS_PER_MINUTE}\n"
    )
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def auto_cluster(
    tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("auto")
    settings = folder / "baton.toml"
    settings.write_text(
        f'[router]\nlocal_max_tokens = {LOCAL_MAX_TOKENS}\ntenants_file = "{tenants_file(folder)}"\n'
        "[prefill]\nprefix_cache = false\n"
    )
    torch.set_num_threads(1)
    async with await LocalCluster.start(config(tiny_model[0], "auto"), config_file=str(settings)) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def search(auto_cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    """A client of "auto" with the key of the tenant "search"."""
    await auto_cluster.wait_ready(BACK_WITHIN_S)
    async with await AsyncClient.connect(auto_cluster.address, api_key=KEYS["search"]) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def colocated_cluster(tiny_model: Tiny) -> AsyncIterator[LocalCluster]:
    torch.set_num_threads(1)
    wanted = config(tiny_model[0], "colocated", prefill=0, decode=2)
    async with await LocalCluster.start(wanted) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def colocated_client(colocated_cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    await colocated_cluster.wait_ready(BACK_WITHIN_S)
    async with await AsyncClient.connect(colocated_cluster.address) as client:
        yield client


async def ask(
    client: AsyncClient, prompt: Sequence[int], num_tokens: int = NUM_TOKENS, **options: Any
) -> tuple[list[int], Summary]:
    """Asks for a greedy answer of that many tokens."""
    generation = client.generate(
        token_ids=prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True, timeout_s=60, **options
    )
    tokens = [token_id async for chunk in generation for token_id in chunk.token_ids]
    assert len(tokens) == num_tokens
    return tokens, generation.summary


async def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a Python module in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def explained(cluster: LocalCluster, request_id: str) -> dict[str, Any]:
    """The only answer that `baton explain` knows of a request."""
    code, out, err = await run(
        "baton.cli.main", "explain", request_id, f"--address={cluster.admin_address}", "--json"
    )
    assert (code, err) == (0, "")
    (answer,) = json.loads(out)["answers"]
    return answer


async def until_indexed(cluster: LocalCluster, prompts: Iterable[Sequence[int]]) -> None:
    """Waits until the router has heard that its one decode worker has all full blocks of these prompts."""
    status = await cluster.wait_ready(BACK_WITHIN_S)
    (size,) = {w.block_size for w in status.workers if (w.name, w.state) == ("decode-0", "ready")}
    expected = sum(len(prompt) // size for prompt in prompts)
    async with asyncio.timeout(5.0):
        while (await cluster.status()).routing.num_prefix_keys < expected:
            await asyncio.sleep(0.02)


def computed_by(summary: Summary) -> str:
    return summary.timings.prefill_worker


@pytest.mark.asyncio(loop_scope="session")
async def test_auto_gives_transformers_tokens_whoever_computes_the_prompt(
    auto_cluster: LocalCluster, search: AsyncClient, tiny_model: Tiny
) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    first = await asyncio.gather(*(ask(search, prompt) for prompt in prompts))
    long = [s for prompt, (_, s) in zip(prompts, first, strict=True) if len(prompt) > LOCAL_MAX_TOKENS]
    assert {computed_by(summary) for summary in long} == {"prefill-0"}
    assert all(summary.timings.transfer_bytes for summary in long)

    await until_indexed(auto_cluster, prompts)
    # Only the decode worker has kept them: the few tokens that it lacks are nothing against all of them.
    again = [await ask(search, prompt) for prompt in prompts]
    _, held = again[-1]
    assert computed_by(held) == "decode-0"
    assert held.num_cached_tokens > len(prompts[-1]) - LOCAL_MAX_TOKENS
    assert held.timings.transfer_bytes == 0
    for prompt, (tokens, _), (tokens_again, _) in zip(prompts, first, again, strict=True):
        assert_greedy(tiny_model[1], prompt, tokens)
        assert_greedy(tiny_model[1], prompt, tokens_again)


@pytest.mark.asyncio(loop_scope="session")
async def test_colocated_gives_transformers_tokens(colocated_client: AsyncClient, tiny_model: Tiny) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    found = await asyncio.gather(*(ask(colocated_client, prompt) for prompt in prompts))
    for prompt, (tokens, summary) in zip(prompts, found, strict=True):
        assert_greedy(tiny_model[1], prompt, tokens)
        assert computed_by(summary) == summary.timings.decode_worker
        assert summary.timings.transfer_bytes == 0
    assert {computed_by(summary) for _, summary in found} == {"decode-0", "decode-1"}


@pytest.mark.asyncio(loop_scope="session")
async def test_a_decode_worker_scores_the_prompts_it_computes(
    colocated_client: AsyncClient, tiny_model: Tiny
) -> None:
    prompt = prompt_of(150)
    with torch.no_grad():
        logprobs = tiny_model[1](torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    expected = [logprobs[index, token].item() for index, token in enumerate(prompt[1:])]

    generation = colocated_client.generate(token_ids=prompt, max_tokens=2, temperature=0, prompt_logprobs=0)
    await generation.text()

    none, *scores = generation.prompt_logprobs
    assert none is None
    assert [score and score.logprob for score in scores] == pytest.approx(expected, abs=1e-4)


@pytest.mark.asyncio(loop_scope="session")
async def test_requests_go_on_without_the_prefill_worker_and_return_to_it(
    auto_cluster: LocalCluster, search: AsyncClient, tiny_model: Tiny
) -> None:
    prompts = [[20 + index] * 400 for index in range(3)]
    os.kill(auto_cluster.pids["prefill-0"], signal.SIGKILL)
    found = await asyncio.gather(*(ask(search, prompt) for prompt in prompts))
    for prompt, (tokens, summary) in zip(prompts, found, strict=True):
        assert_greedy(tiny_model[1], prompt, tokens)
        assert computed_by(summary) == "decode-0"
    await auto_cluster.wait_ready(BACK_WITHIN_S)
    _, summary = await ask(search, [30] * 400)
    assert (computed_by(summary), summary.timings.num_attempts) == ("prefill-0", 1)


@pytest.mark.asyncio(loop_scope="session")
async def test_the_command_says_of_a_request_what_its_summary_says(
    auto_cluster: LocalCluster, search: AsyncClient
) -> None:
    _, summary = await ask(search, [40] * 300, request_id="told-twice")
    said = summary.explain
    assert (said.bucket, said.num_prompt_tokens, said.outcome) == ("256-511", 300, "OK")
    (attempt,) = said.attempts
    assert attempt.place is not None
    assert (attempt.place.prefill_worker, attempt.place.decode_worker) == ("prefill-0", "decode-0")

    answer = await explained(auto_cluster, "told-twice")
    expected = json.loads(json.dumps(dataclasses.asdict(said)))
    assert answer | {"reported_at_ms": 0} == expected | {"reported_at_ms": 0}
    code, drawn, _ = await run(
        "baton.cli.main", "explain", "told-twice", f"--address={auto_cluster.admin_address}"
    )
    assert code == 0
    for word in ("told-twice", "256-511", "prefill-0", "decode-0", "queue", "transfer"):
        assert word in drawn


@pytest.mark.asyncio(loop_scope="session")
async def test_an_unknown_request_is_wrong_usage(auto_cluster: LocalCluster) -> None:
    code, out, err = await run(
        "baton.cli.main", "explain", "never-asked", f"--address={auto_cluster.admin_address}"
    )
    assert (code, out) == (2, "")
    assert "no request 'never-asked' is known to router-0" in err
    assert "--address names its admin port" in err


@pytest.mark.asyncio(loop_scope="session")
async def test_an_objective_that_cannot_be_met_is_refused(search: AsyncClient) -> None:
    prompt = prompt_of(1500)
    with pytest.raises(Overloaded, match="ttft_objective_ms") as caught:
        await ask(search, prompt, ttft_objective_ms=1)
    assert caught.value.status == "RESOURCE_EXHAUSTED"
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 0
    await ask(search, prompt)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_resumed_request_shows_both_attempts(
    colocated_cluster: LocalCluster, colocated_client: AsyncClient, tiny_model: Tiny
) -> None:
    prompt, num_tokens = [50] * 40, 1500
    generation = colocated_client.generate(
        token_ids=prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True, request_id="resumed"
    )
    tokens: list[int] = []
    lost = ""
    async for chunk in generation:
        tokens += chunk.token_ids
        if len(tokens) >= 20 and not lost:
            lost = await worker_in_use(colocated_cluster, "resumed")
            os.kill(colocated_cluster.pids[lost], signal.SIGKILL)
    assert len(tokens) == num_tokens
    assert_greedy(tiny_model[1], prompt, tokens)
    summary = generation.summary
    assert summary.timings.num_attempts == 2

    answer = await explained(colocated_cluster, "resumed")
    (other,) = {"decode-0", "decode-1"} - {lost}
    first, second = answer["attempts"]
    assert (first["outcome"], second["outcome"], second["reason"]) == ("PEER_LOST", "OK", "")
    assert lost in first["reason"]
    assert [chosen(attempt) for attempt in (first, second)] == [lost, other]
    assert [attempt.outcome for attempt in summary.explain.attempts] == ["PEER_LOST", "OK"]
    code, drawn, _ = await run(
        "baton.cli.main", "explain", "resumed", f"--address={colocated_cluster.admin_address}"
    )
    assert code == 0
    assert f"{lost} was lost" in drawn


async def worker_in_use(cluster: LocalCluster, request_id: str) -> str:
    """Where a request runs, as its router explains it meanwhile."""
    (answer,) = (await fetch_explain(request_id, cluster.admin_address)).answers
    (attempt,) = RouteExplain.from_proto(answer).attempts
    assert attempt.place is not None
    assert attempt.outcome == ""
    return attempt.place.decode_worker


def chosen(attempt: dict[str, Any]) -> str:
    (candidate,) = (candidate for candidate in attempt["candidates"] if candidate["chosen"])
    assert candidate["prefill_worker"] == candidate["decode_worker"]
    return str(candidate["decode_worker"])


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.usefixtures("search")
async def test_a_call_without_a_known_key_is_refused(auto_cluster: LocalCluster) -> None:
    async with open_channel(auto_cluster.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="authorization") as refused:
            await InferenceServiceStub(channel).ListModels(ListModelsRequest(), timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    for key in (None, "a-key-that-nobody-has"):
        async with await AsyncClient.connect(auto_cluster.address, api_key=key) as client:
            with pytest.raises(Unauthenticated) as caught:
                await ask(client, [60] * 10)
        assert caught.value.field == "authorization"
    async with await AsyncClient.connect(auto_cluster.address, api_key=KEYS["mail"]) as client:
        _, summary = await ask(client, [60] * 10)
    assert summary.explain.tenant == "mail"


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.usefixtures("search")
async def test_a_tenant_that_has_used_its_tokens_is_told_when_to_come_back(
    auto_cluster: LocalCluster,
) -> None:
    async with await AsyncClient.connect(auto_cluster.address, api_key=KEYS["trial"]) as client:
        await ask(client, [61] * 40, num_tokens=2)
        with pytest.raises(Overloaded, match="trial") as caught:
            await ask(client, [61] * 40, num_tokens=2)
    assert caught.value.status == "RESOURCE_EXHAUSTED"
    # 60 - 42 are left, and one comes back each second.
    assert caught.value.retry_after_s == pytest.approx(40 - (60 - 42), abs=5)


@pytest.mark.asyncio(loop_scope="session")
async def test_tenants_do_not_share_cached_prefixes(auto_cluster: LocalCluster, search: AsyncClient) -> None:
    prompt = prompt_of(800)
    _, first = await ask(search, prompt)
    async with asyncio.timeout(10.0):
        while computed_by((await ask(search, prompt))[1]) != "decode-0":
            await asyncio.sleep(0.02)
    _, again = await ask(search, prompt)
    async with await AsyncClient.connect(auto_cluster.address, api_key=KEYS["mail"]) as mail:
        _, of_other = await ask(mail, prompt)
    assert again.num_cached_tokens > len(prompt) - LOCAL_MAX_TOKENS
    # Nothing of it is held by the only decode worker, which has it all.
    for summary in (first, of_other):
        assert (computed_by(summary), summary.num_cached_tokens) == ("prefill-0", 0)
    assert of_other.timings.transfer_bytes == first.timings.transfer_bytes


@pytest.mark.asyncio(loop_scope="session")
async def test_the_log_of_decisions_replays_and_tells_no_secret(tiny_model: Tiny, tmp_path: Path) -> None:
    log, settings = tmp_path / "decisions.jsonl", tmp_path / "baton.toml"
    settings.write_text(
        f'[router]\ntenants_file = "{tenants_file(tmp_path)}"\ndecision_log = "{log}"\n', encoding="utf-8"
    )
    canary = "canary" * 30
    async with (
        await LocalCluster.start(config(tiny_model[0], "auto"), config_file=str(settings)) as cluster,
        await AsyncClient.connect(cluster.address, api_key=KEYS["search"]) as client,
    ):
        await asyncio.gather(*(ask(client, prompt_of(length)) for length in LENGTHS))
        await client.generate(canary, request_id="canary-1", max_tokens=8, ignore_eos=True).text()

    code, out, err = await run(
        "router.replay", str(log), "--policy", "recorded", "--policy", "cost", "--json"
    )
    assert (code, err) == (0, "")
    replayed = json.loads(out)
    assert (replayed["num_requests"], replayed["num_left_out"]) == (len(LENGTHS) + 1, 0)
    assert [row["policy"] for row in replayed["policies"]] == ["recorded", "cost"]
    text = log.read_text()
    for secret in ("canary", "search", KEYS["search"], digest_of(KEYS["search"]).partition(":")[2]):
        assert secret not in text
