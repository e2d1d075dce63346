"""What a start compiles against what steps run, in a process where Triton is not interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def serving(what: str, folder: Path) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.kernels.serving", what]
    done = subprocess.run(
        command,
        env={**environment, "BATON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(300)
def test_no_step_and_no_transfer_needs_a_program_that_the_start_did_not_load(tmp_path: Path) -> None:
    found = serving("programs", tmp_path)

    assert len(found) == 10, "five models on two devices"
    for where, programs in found.items():
        assert programs["new"] == [], where
        assert programs["started"] >= programs["served"] >= 20, where


@pytest.mark.timeout(120)
def test_what_is_measured_and_audited_is_what_the_pass_launches(tmp_path: Path) -> None:
    found = serving("calls", tmp_path)

    assert len(found) == 5
    for model, calls in found.items():
        assert calls["pass alone"] == calls["measured alone"] == [], model
        assert calls["number"] >= 12, model


def test_calls_of_one_shape_are_one_program(tmp_path: Path) -> None:
    found = serving("shapes", tmp_path)

    assert found["torn"] == []
    assert found["number"] >= 100
