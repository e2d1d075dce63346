"""The oracle of a chaos run: it takes what transformers says for right, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from baton.errors import InternalError
from baton.sampling import SamplingParams
from benchmarks.chaos.load import Case, Record
from benchmarks.chaos.oracle import Oracle
from benchmarks.tiny_llama import write_tiny_model
from tests.sampling_oracle import oracle_tokens

PROMPT = (17, 4, 200, 31)
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    folder: Path = tmp_path_factory.mktemp("oracle") / "tiny"
    return write_tiny_model(folder)


@pytest.fixture(scope="module", params=[0.0, 0.8], ids=["greedy", "sampled"])
def record(request: pytest.FixtureRequest, model: LlamaForCausalLM) -> Record:
    """A right answer, made token by token with independent random numbers."""
    case = Case(prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=request.param, seed=5 << 33 | 9)
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=case.temperature, seed=case.seed, ignore_eos=True
    )
    expected = oracle_tokens(model, PROMPT, params)
    assert expected.tie_at is None
    return Record(case=case, asked_at=0, ended_at=1, tokens=tuple(expected.tokens))


def test_a_right_answer_is_right_and_every_other_is_wrong(model: LlamaForCausalLM, record: Record) -> None:
    oracle = Oracle(model)
    assert oracle.is_right(record)
    for place, token_id in enumerate(record.tokens):
        changed = (*record.tokens[:place], (token_id + 1) % 259, *record.tokens[place + 1 :])
        assert not oracle.is_right(replace(record, tokens=changed))
    assert not oracle.is_right(replace(record, tokens=record.tokens[:-1]))


def test_an_answer_that_was_ended_is_right_as_far_as_it_goes(model: LlamaForCausalLM, record: Record) -> None:
    oracle = Oracle(model)
    ended = replace(record, outcome="cancelled", tokens=record.tokens[:5])
    assert oracle.is_right(ended)
    assert oracle.is_right(replace(ended, tokens=()))
    assert not oracle.is_right(replace(ended, tokens=(*record.tokens[:4], record.tokens[4] ^ 1)))


def test_undisturbed_answers_are_checked_before_they_count(model: LlamaForCausalLM, record: Record) -> None:
    wrong = replace(record, tokens=(*record.tokens[:-1], (record.tokens[-1] + 1) % 259))
    with pytest.raises(InternalError, match="undisturbed"):
        Oracle(model).learn([record, wrong])
    with pytest.raises(InternalError, match="undisturbed"):
        Oracle(model).learn([replace(record, outcome="failed", tokens=())])
