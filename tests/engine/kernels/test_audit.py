"""Kernels compiled for GPUs that are not there, in processes where Triton is not interpreted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
DOCUMENT = Path(__file__).parents[3] / "docs" / "kernels.md"
LLAMA = ("--model", "Llama-3.1-8B", "--block-size", "16", "--brief")


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def compiling(what: str) -> Any:
    done = run_module("tests.engine.kernels.compiling", what)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_audited(done: subprocess.CompletedProcess[str], at_least: int) -> None:
    faulty = [line for line in done.stdout.splitlines() if not line.startswith("good: ")]
    assert done.returncode == 0, (faulty, done.stderr)
    (summary,) = faulty
    counts = re.fullmatch(r"(\d+) compiled, 0 with faults", summary)
    assert counts is not None, summary
    assert int(counts[1]) >= at_least


@pytest.mark.timeout(600)
def test_kernels_of_a_known_model_hold_what_devices_have_and_use_their_tensor_cores() -> None:
    assert_audited(run_module("engine.kernels.audit", *LLAMA), at_least=60)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_so_do_all_configurations_of_all_models_and_the_document_says_so(tmp_path: Path) -> None:
    written = tmp_path / DOCUMENT.name
    written.write_text(DOCUMENT.read_text("utf-8"), "utf-8")

    assert_audited(run_module("engine.kernels.audit", "--write", str(written)), at_least=500)

    assert written.read_text("utf-8") == DOCUMENT.read_text("utf-8"), (
        "run `python -m engine.kernels.audit --write docs/kernels.md`"
    )


def test_the_audit_finds_what_is_wrong() -> None:
    found = compiling("flaws")

    (spill,) = found["spills"]["sm_90"]
    assert re.fullmatch(r"spills \d+ bytes", spill)
    assert "multiplies without tensor cores" in found["no tensor core"]["sm_80"]
    assert found["narrow"] == {
        "sm_80": [],
        "sm_90": ["multiplies by mma, not wgmma"],
        "sm_100": ["multiplies by mma, not tcgen05"],
    }
    assert found["none"] == {"sm_80": [], "sm_90": [], "sm_100": [], "gfx942": []}


def test_kv_is_stored_to_every_set_of_targets_in_either_type() -> None:
    found = compiling("storing")

    assert found == {
        str({"cache": kind, "rows": rows, "stage": stage}): []
        for kind in ("bfloat16", "float16")
        for rows in ("none", "bfloat16")
        for stage in ("none", kind)
    }


def test_what_is_audited_is_what_the_dispatcher_would_compile() -> None:
    found = compiling("dispatcher")

    assert found["differing"] == []
    assert found["num_calls"] >= 200
