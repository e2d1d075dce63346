"""What benchmarks.engine asks and reckons; of the engines our own is asked, for a few tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from baton.models import ModelDir
from benchmarks.engine import __main__ as engine
from benchmarks.engine.processes import OURS, TRANSFORMERS, VLLM, SideError, started
from benchmarks.engine.side import prompt
from benchmarks.tiny_llama import write_tiny_model

ROOT = Path(__file__).parents[2]


def test_no_prompt_shares_a_prefix_with_another() -> None:
    prompts = [prompt(40, number, 40_100) for number in range(200)]
    assert len({ids[0] for ids in prompts}) == 200
    assert all(100 <= token < 40_100 for ids in prompts for token in ids)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder)
    return ModelDir.open(folder)


def test_rows_have_ratios_to_peers_and_null_for_those_that_are_missing(tiny: ModelDir) -> None:
    times: engine.Times = defaultdict(list)
    times["gemm", ""] = [1e12] * 3
    times["read", ""] = [2e10] * 3
    times["prefill 512", OURS] = [0.2, 0.25, 0.5]
    times["prefill 512", TRANSFORMERS] = [0.5, 0.4, 0.6]
    times["decode step of 8", OURS] = [0.02, 0.03, 0.01]
    times["decode step of 8", TRANSFORMERS] = [0.01, 0.01, 0.01]
    rows = {(row.metric, row.peer_name): row for row in engine._rows(times, tiny)}
    prefill = rows["prefill 512", TRANSFORMERS]
    assert (prefill.ours, prefill.peer, prefill.ratio, prefill.target) == (2048, 1024, 2.0, 1.3)
    step = rows["decode step of 8", TRANSFORMERS]
    assert (step.ours, step.peer, step.ratio, step.target) == (20, 10, 0.5, None)
    missing = rows["decode step of 8", VLLM]
    assert (missing.ours, missing.peer, missing.ratio, missing.target) == (20, None, None, 2.0)
    nothing = rows["prefill 128", VLLM]
    assert (nothing.ours, nothing.peer, nothing.ratio, nothing.runs) == (None, None, None, 0)
    assert ("prefill 512, of matrix product", None) in rows
    assert ("prefill 128, of matrix product", None) not in rows


def test_a_side_answers_and_ends_with_its_input(tiny: ModelDir, tmp_path: Path) -> None:
    with started(OURS, tiny, threads=1, peers=tmp_path, logs=tmp_path) as side:
        assert 0 < side.seconds([5, 9], 3) < 60
        process = side._process
    assert process.returncode == 0


def test_a_side_that_cannot_load_says_why(tiny: ModelDir, tmp_path: Path) -> None:
    damaged = replace(tiny, path=tmp_path / "nowhere")
    with (
        pytest.raises(SideError, match=r"baton ended; it said last: .*nowhere"),
        started(OURS, damaged, threads=1, peers=tmp_path, logs=tmp_path),
    ):
        pass


def test_the_environment_of_a_peer_needs_nothing_of_ours() -> None:
    """side.py alone, without our packages."""
    code = "import json, side; side.answer(lambda folder, threads: lambda prompts, tokens: None)"
    ran = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, 'benchmarks/engine'); {code}",
            "model",
            "1",
            "300",
        ],
        input=json.dumps({"prompts": [3], "tokens": 1}) + "\n",
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    ready, answer = (json.loads(line) for line in ran.stdout.splitlines())
    assert ready == {"ready": True}
    assert answer["seconds"] >= 0
