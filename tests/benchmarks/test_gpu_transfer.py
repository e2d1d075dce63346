from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from benchmarks.on_gpu import transfer_child
from benchmarks.on_gpu.section import Budget, GpuRow
from benchmarks.on_gpu.transfer import CPU, run
from benchmarks.on_gpu.transfer_child import Child
from benchmarks.on_gpu.transfer_model import SIZES

torch.set_num_threads(1)

DEVICE = torch.device("cpu")


def rows_of(seconds: float) -> dict[str, GpuRow]:
    return {row.metric: row for row in run(DEVICE, Budget.of(seconds))}


def test_two_processes_answer_as_one_and_survive_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Where measurements of kernels would be found.
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    rows = rows_of(150.0)

    assert [row for row in rows.values() if row.trouble] == []
    # Whether what went over decodes to the tokens of a model that computed all by itself.
    assert rows["KV transfer, same tokens"].ours == len(CPU.exact_prompts) == 2
    # Whether the other one has given everything back, and a new one has taken its place.
    assert rows["KV transfer, prefill process killed"].ours == 1
    assert rows["KV transfer, prefill process killed"].also["frames stored"] >= CPU.held_after
    assert rows["KV transfer, decode process killed"].ours == 1
    ((length, frame_bytes),) = CPU.fast_prompts
    name = f"KV {length}, {frame_bytes >> 10} KiB frames"
    sent = rows[f"{name}: meanwhile"]
    size = SIZES["interpreted"]
    # Whole blocks of keys and values in float32.
    block_bytes = 2 * 4 * size.block_size * size.config.num_layers * size.config.head_dim
    assert sent.also["MB"] == pytest.approx(-(-length // size.block_size) * block_bytes / 1e6)
    # The last chunk lies in the stage, the one before it in the cache alone.
    assert sent.also["staged frames"] > 0
    assert sent.also["cache frames"] > 0
    assert 0 <= sent.also["hidden"] <= 1
    before = rows[f"{name}: computed before"]
    assert before.also["MB"] == sent.also["MB"]
    assert sent.also["min GB/s"] <= (sent.ours or 0) <= sent.also["max GB/s"]
    assert rows[f"{name}: tokens as computed alone"].ours == 1
    assert rows[f"{name}: prefill"].peer is not None
    assert "KV frames, digest: xxh3, 64 bits" in rows


def test_without_time_every_part_says_so() -> None:
    assert [row.trouble for row in rows_of(0.0).values()] == ["not run: no time left"] * 4


def test_a_process_that_does_nothing_costs_its_deadline_and_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer_child, "_END_S", 0.1)
    child = Child("decode")
    os.kill(child.pid, signal.SIGSTOP)

    began = time.monotonic()
    with pytest.raises(TimeoutError, match="decode did not answer"):
        child.ask("digest", 0.1)
    child.close()

    assert time.monotonic() - began < 10
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
