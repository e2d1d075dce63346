"""docs/planning.md shows what the command says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from tests.baton.plan.test_plan import LLAMA_8B
from tests.docs.snippets import ROOT

GUIDE = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


def test_the_example_is_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.chdir(tmp_path)
    found = re.search(r"```console\n\$ baton (plan [^\n]*)\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    shown = CliRunner().invoke(app, shlex.split(found[1]))
    assert shown.exit_code == 0, shown.output
    lines = [line.rstrip() for line in shown.output.splitlines() if line.strip()]
    assert lines == [line.rstrip() for line in found[2].splitlines() if line.strip()]
