"""Which way prompt chunks go, and what is kept of the measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.model_config import ModelConfig
from engine.cpu import chunk_choice
from engine.cpu.chunk_choice import CASES, MAX_MASK, ChunkChoice
from tests.engine.tiny_models import AWKWARD

CONFIG = ModelConfig.from_hf(
    {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **AWKWARD}
)


def test_a_chunk_goes_as_the_nearest_case_of_its_kind() -> None:
    choice = ChunkChoice({case: case in ((128, 128), (512, 2048)) for case in CASES})
    assert choice.fuses(128, 128, 0)
    assert choice.fuses(100, 100, 0)
    assert choice.fuses(200, 200, 0)
    assert not choice.fuses(33, 33, 0)
    assert not choice.fuses(5000, 5000, 0)
    # No case of a whole prompt, however near.
    assert not choice.fuses(128, 129, 0)
    assert choice.fuses(500, 1900, 0)
    assert choice.fuses(1000, 9000, 0)


def test_windows_and_masks_that_would_be_large_are_for_blocks() -> None:
    choice = ChunkChoice(dict.fromkeys(CASES, True))
    assert choice.fuses(512, 2048, 0)
    assert not choice.fuses(512, 2048, 1024)
    assert not choice.fuses(2048, MAX_MASK // 2048 + 1, 0)


@pytest.mark.parametrize("slower", ["fused_attention", "blocked_attention"])
def test_the_faster_way_is_found_out(monkeypatch: pytest.MonkeyPatch, slower: str) -> None:
    """By a clock that only the slower one moves."""
    now = 0.0
    original = getattr(chunk_choice, slower)

    def slow(*arguments: object, **options: object) -> object:
        nonlocal now
        now += 1.0
        return original(*arguments, **options)

    monkeypatch.setattr(chunk_choice, slower, slow)
    monkeypatch.setattr(chunk_choice.time, "perf_counter", lambda: now)
    faster = chunk_choice.is_fused_faster(CONFIG, torch.float32, 32, 64)
    assert faster == (slower == "blocked_attention")


def test_what_was_measured_is_kept_and_a_damaged_file_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    measured: list[tuple[int, int]] = []

    def odd(_config: object, _dtype: object, num_new: int, context: int) -> bool:
        measured.append((num_new, context))
        return len(measured) % 2 == 1

    monkeypatch.setattr(chunk_choice, "is_fused_faster", odd)
    first = ChunkChoice.of(CONFIG, torch.bfloat16)
    assert measured == list(CASES)
    assert ChunkChoice.of(CONFIG, torch.bfloat16) == first
    assert len(measured) == len(CASES)
    # Another shape of the same model.
    ChunkChoice.of(CONFIG, torch.float32)
    assert len(measured) == 2 * len(CASES)
    for damaged in ("{", "[true]", "3"):
        for file in (tmp_path / "cpu").iterdir():
            file.write_text(damaged)
        before = len(measured)
        ChunkChoice.of(CONFIG, torch.bfloat16)
        assert len(measured) == before + len(CASES)


def test_a_folder_that_cannot_be_written_costs_the_measurement_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(chunk_choice, "is_fused_faster", lambda *_: True)
    assert all(ChunkChoice.of(CONFIG, torch.bfloat16).fused.values())
