"""A thousand requests with random parameters, disaggregated, against the oracle: tokens, text and logprobs.

The pools are so small that requests give way to each other, and a third of the answers is cut off
by its client and goes on as another request. Neither may change a token.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from baton.rpc import open_channel
from baton.sampling import Grammar, SamplingParams
from baton.v1.inference_service_pb2 import Chunk, GenerateRequest, GenerateResponse, PartialAnswer, Summary
from baton.v1.inference_service_pb2_grpc import InferenceServiceStub
from benchmarks.tiny_llama import CONTROL, byte_tokenizer
from tests.integration.conftest import ANY_PORTS
from tests.sampling_oracle import choose, exact_logprobs, likeliest, oracle_prompt_logprobs

NUM_REQUESTS = 1_000
CONCURRENCY = 32
EOS = 0
TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.get_vocab_size()
LETTERS = "abcdef"
# Of 256 bytes a token: room for some five of these requests, where 32 and more run.
TIGHT_BYTES = 200 * 256
# Small, so that an answer grows by several; different, so that the transfer converts.
BLOCK_SIZES = {"BATON_PREFILL_BLOCK_SIZE": "8", "BATON_DECODE_BLOCK_SIZE": "4"}
# Blocks kept free for the growth of answers would leave few to give way.
KEEPS_NONE_FREE = {"BATON_ROUTER_OUTPUT_QUANTILE": "0"}


@dataclass(kw_only=True)
class Case:
    """One request. cut_after: tokens after which the client leaves and asks again, or None."""

    prompt: list[int]
    params: SamplingParams
    n: int
    cut_after: int | None

    def leaves(self, got: Got) -> bool:
        """Whether the client leaves now. A complete answer is not computed again for its prompt's sake."""
        has_prompt = self.params.prompt_logprobs is None or len(got.prompt) == len(self.prompt) - 1
        return self.cut_after is not None and has_prompt and len(got.answers[0].token_ids) >= self.cut_after

    def proto(self, known: Sequence[PartialAnswer] = ()) -> GenerateRequest:
        params = self.params.to_proto()
        same = [
            f.name for f in params.DESCRIPTOR.fields if f.name in GenerateRequest.DESCRIPTOR.fields_by_name
        ]
        plain = {name: getattr(params, name) for name in same if name not in ("grammar", "prompt_logprobs")}
        proto = GenerateRequest(**plain, n=self.n, partial_answers=known, skip_special_tokens=False)
        proto.token_ids.ids.extend(self.prompt)
        if self.params.prompt_logprobs is not None:
            proto.prompt_logprobs = self.params.prompt_logprobs
        if self.params.grammar is not None:
            proto.grammar.CopyFrom(params.grammar)
        return proto


@dataclass
class Answer:
    """What one answer's client got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    text: str = ""

    def take(self, chunk: Chunk) -> None:
        assert chunk.start_index == len(self.token_ids), "a token was repeated or skipped"
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.top += [list(zip(t.token_ids, t.logprobs, strict=True)) for t in chunk.top_logprobs]
        self.text += chunk.text

    def partial(self, index: int) -> PartialAnswer:
        return PartialAnswer(index=index, token_ids=self.token_ids, num_chars=len(self.text))


@dataclass
class Got:
    """Everything of one request."""

    answers: list[Answer]
    prompt: dict[int, tuple[float, list[int]]] = field(default_factory=dict)
    summary: Summary | None = None
    was_cut: bool = False

    def take(self, response: GenerateResponse) -> None:
        match response.WhichOneof("payload"):
            case "chunk":
                self.answers[response.chunk.index].take(response.chunk)
            case "prompt_logprobs":
                scored = response.prompt_logprobs
                for offset, logprob in enumerate(scored.logprobs):
                    top = list(scored.top_logprobs[offset].token_ids) if scored.top_logprobs else []
                    self.prompt[scored.start_index + offset] = (logprob, top)
            case "summary":
                self.summary = response.summary


def random_case(rng: random.Random, stems: list[list[int]]) -> Case:
    prompt = [rng.randrange(len(CONTROL), VOCAB) for _ in range(rng.randint(1, 30))]
    if rng.random() < 0.3:
        prompt = rng.choice(stems) + prompt
    has_grammar = rng.random() < 0.1
    params = grammar_params(rng) if has_grammar else random_params(rng)
    cut_after = rng.randint(1, 8) if rng.random() < 0.5 else None
    return Case(prompt=prompt, params=params, n=rng.choice((1,) * 9 + (3,)), cut_after=cut_after)


def grammar_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.getrandbits(64),
        max_tokens=8,
        logprobs=True,
        grammar=Grammar(kind="regex", source=f"[{LETTERS}]{{3,8}}"),
    )


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value: Any, default: Any, chance: float = 0.3) -> Any:
        return value if rng.random() < chance else default

    def real(low: float, high: float) -> float:
        return float(np.float32(rng.uniform(low, high)))

    return SamplingParams(
        temperature=maybe(real(0.1, 2), 0.0, 0.7),
        top_k=maybe(rng.randint(1, 60), 0),
        top_p=maybe(real(0.2, 0.99), 1.0),
        min_p=maybe(real(0.001, 0.3), 0.0),
        repetition_penalty=maybe(real(0.5, 2), 1.0),
        presence_penalty=maybe(real(-2, 2), 0.0),
        frequency_penalty=maybe(real(-2, 2), 0.0),
        logit_bias=maybe(tuple((token_id, real(-5, 5)) for token_id in range(0, VOCAB, 23)), ()),
        allowed_token_ids=maybe(tuple(sorted(rng.sample(range(VOCAB), 100))), (), 0.2),
        seed=rng.getrandbits(64),
        max_tokens=rng.randint(1, 20),
        min_tokens=maybe(1, 0),
        stop_token_ids=maybe(tuple(rng.sample(range(VOCAB), 8)), ()),
        ignore_eos=rng.random() < 0.3,
        logprobs=True,
        top_logprobs=rng.choice((0, 0, 3)),
        prompt_logprobs=maybe(2, None, 0.1),
    )


async def ask(stub: InferenceServiceStub, case: Case, turn: asyncio.Semaphore) -> Got:
    """Asks, leaves after cut_after tokens of the first answer if the case says so, and asks for the rest."""
    got = Got([Answer() for _ in range(case.n)])
    async with turn, asyncio.timeout(120):
        call = stub.Generate(case.proto())
        async for response in call:
            got.take(response)
            if case.leaves(got):
                got.was_cut = got.summary is None
                call.cancel()
                break
        if got.was_cut:
            known = [answer.partial(index) for index, answer in enumerate(got.answers)]
            async for response in stub.Generate(case.proto(known)):
                got.take(response)
    return got


def allowed_letters(answer: Sequence[int]) -> np.ndarray:
    """What `[a-f]{3,8}` allows after these tokens, by counting."""
    mask = np.zeros(VOCAB, np.bool_)
    if len(answer) < 8:
        mask[[TOKENIZER.token_to_id(letter) for letter in LETTERS]] = True
    if len(answer) >= 3:
        mask[EOS] = True
    return mask


def check(got: Answer, case: Case, index: int, model: LlamaForCausalLM) -> bool:
    """Every token is what the oracle chooses after those before it; whether a tie kept that from being said.

    One forward pass yields the logits of all places, as long as all tokens before are right: induction.
    """
    params, tokens = case.params, got.token_ids
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else [EOS])}
    with torch.inference_mode():
        ids = torch.tensor([case.prompt + tokens[:-1]])
        logits_SV = model(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0].float()
    for place, token_id in enumerate(tokens):
        chosen, is_tie = choose(
            logits_SV[place],
            case.prompt,
            tokens[:place],
            params,
            stops=stops,
            sample_index=index,
            mask=allowed_letters if params.grammar else None,
        )
        if is_tie:
            return True
        assert token_id == chosen
        logprobs = exact_logprobs(logits_SV[place])
        assert got.logprobs[place] == pytest.approx(float(logprobs[token_id]), abs=2e-4)
        if params.top_logprobs:
            top = [value for _, value in likeliest(logits_SV[place], params.top_logprobs)]
            assert [value for _, value in got.top[place]] == pytest.approx(top, abs=2e-4)
        assert (token_id in stops) <= (place == len(tokens) - 1), "the answer went on after its end"
    is_whole = params.grammar is not None and len(tokens) == 8
    assert tokens[-1] in stops or len(tokens) == params.max_tokens or is_whole, "the answer ended too early"
    return False


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tight_cluster(tiny_model: tuple[Path, LlamaForCausalLM]) -> AsyncIterator[LocalCluster]:
    """One worker of each role with too little room for the load."""
    config = ClusterConfig(
        model=str(tiny_model[0]),
        dtype="float32",
        kv_cache_bytes=TIGHT_BYTES,
        placement="disaggregated",
        ray=False,
        **ANY_PORTS,
    )
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (BLOCK_SIZES | KEEPS_NONE_FREE).items():
            environment.setenv(name, value)
        async with await LocalCluster.start(config) as cluster:
            yield cluster


@pytest.mark.asyncio(loop_scope="session")
async def test_random_parameters_are_the_oracles_through_cuts_and_preemption(
    tight_cluster: LocalCluster, tiny_model: tuple[Path, LlamaForCausalLM]
) -> None:
    rng = random.Random(20)
    stems = [[rng.randrange(len(CONTROL), VOCAB) for _ in range(33)] for _ in range(3)]
    cases = [random_case(rng, stems) for _ in range(NUM_REQUESTS)]
    turn = asyncio.Semaphore(CONCURRENCY)
    async with open_channel(tight_cluster.address) as channel:
        stub = InferenceServiceStub(channel)
        got = await asyncio.gather(*(ask(stub, case, turn) for case in cases))

    torch.set_num_threads(1)
    num_ties = 0
    for case, found in zip(cases, got, strict=True):
        for index, answer in enumerate(found.answers):
            num_ties += check(answer, case, index, tiny_model[1])
            assert answer.text == TOKENIZER.decode(answer.token_ids, skip_special_tokens=False)
        check_prompt(case, found, tiny_model[1])
        check_usage(case, found)
    summaries = [found.summary for found in got if found.summary is not None]
    preempted = sum(summary.timings.num_preemptions for summary in summaries)
    was_cut = sum(found.was_cut for found in got)
    cached = sum(summary.num_cached_tokens > 0 for summary in summaries)
    print(
        f"{was_cut} cut off, {preempted} times preempted, {cached} with cached tokens, {num_ties} with ties"
    )
    assert was_cut >= NUM_REQUESTS / 3
    assert preempted >= 2
    assert cached >= NUM_REQUESTS / 10
    assert num_ties <= NUM_REQUESTS / 20


def check_prompt(case: Case, found: Got, model: LlamaForCausalLM) -> None:
    if case.params.prompt_logprobs is None:
        assert found.prompt == {}
        return
    expected = oracle_prompt_logprobs(model, case.prompt, case.params.prompt_logprobs)
    assert sorted(found.prompt) == list(range(1, len(case.prompt)))
    for index, (logprob, _) in enumerate(expected, start=1):
        assert found.prompt[index][0] == pytest.approx(logprob, abs=2e-4)


def check_usage(case: Case, found: Got) -> None:
    summary = found.summary
    assert summary is not None
    assert summary.num_prompt_tokens == len(case.prompt)
    assert summary.num_output_tokens == sum(len(answer.token_ids) for answer in found.answers)
    assert [choice.num_output_tokens for choice in summary.choices] == [
        len(a.token_ids) for a in found.answers
    ]
