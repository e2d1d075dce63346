"""The naive side: padding is computed, and changes no answer."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.padded_fifo import PaddedBatches, serve
from tests.engine.tiny_models import load_runner, save_reference

torch.set_num_threads(1)

PROMPTS = [[5, 9, 80, 33], list(range(40, 51)), [17], [61, 62, 7, 7, 3, 90, 12]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save_reference(folder)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[2:3], PROMPTS[:2] * 2], ids=["four", "one", "twice"])
def test_answers_are_those_of_each_prompt_alone(
    reference: tuple[Path, LlamaForCausalLM], prompts: list[list[int]]
) -> None:
    folder, oracle = reference
    model = PaddedBatches(load_runner(folder))

    with torch.inference_mode():
        expected = [int(oracle(torch.tensor([prompt])).logits[0, -1].argmax()) for prompt in prompts]

    assert model.run(prompts) == expected
    # A second batch overwrites the first one's blocks.
    assert model.run(prompts) == expected


def test_every_row_has_the_longest_prompts_tokens(reference: tuple[Path, LlamaForCausalLM]) -> None:
    batch = PaddedBatches(load_runner(reference[0])).batch(PROMPTS)

    assert batch.cu_seqlens_q.tolist() == [0, 11, 22, 33, 44]
    assert batch.logits_rows.tolist() == [3, 21, 22, 39]
    # No two tokens share a slot.
    assert len(set(batch.slot_mapping.tolist())) == 44


class PlayedModel:
    """Answers with a prompt's length, and notes its batches."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []

    def run(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self.batches.append([list(prompt) for prompt in prompts])
        return [len(prompt) for prompt in prompts]


def test_prompts_are_answered_in_order_of_arrival_in_bounded_batches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [[number] * (number % 3 + 1) for number in range(10)]
    lines = [json.dumps({"number": n, "token_ids": prompt}) for n, prompt in enumerate(prompts)]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    model = PlayedModel()

    serve(model, batch_size=4)

    assert [prompt for batch in model.batches for prompt in batch] == prompts
    assert max(map(len, model.batches)) <= 4
    ready, *answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ready == {"ready": True}
    assert answers == [{"number": n, "token_id": n % 3 + 1} for n in range(10)]
