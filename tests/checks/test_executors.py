"""The executor check finds what ruff cannot see, where it is not allowed and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.executors import complaints

PYPROJECT = """
[tool.ruff.lint.per-file-ignores]
"**/__main__.py" = ["D1", "TID251"]
"engine/thread.py" = ["TID251"]
"baton/cli/**" = ["B008"]
"""
USE = "async def f(loop):\n    await loop.run_in_executor(None, print)\n"


def tree(root: Path, name: str, text: str) -> Path:
    (root / "pyproject.toml").write_text(PYPROJECT)
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return root


@pytest.mark.parametrize("name", ["router/text.py", "engine/loop.py", "baton/cli/main.py"])
def test_an_executor_is_found_in_whatever_is_not_exempt_from_the_bans(tmp_path: Path, name: str) -> None:
    [complaint] = complaints(tree(tmp_path, name, USE))
    assert complaint.startswith(f"{name}:2: run_in_executor ")


@pytest.mark.parametrize("name", ["engine/thread.py", "router/__main__.py", "scripts/other.py"])
def test_edges_and_other_folders_may_use_one(tmp_path: Path, name: str) -> None:
    assert complaints(tree(tmp_path, name, USE)) == []


def test_a_method_that_is_only_handed_on_is_found_too(tmp_path: Path) -> None:
    [complaint] = complaints(
        tree(tmp_path, "router/text.py", "def f(loop):\n    return loop.run_in_executor\n")
    )
    assert complaint.startswith("router/text.py:2: ")


def test_the_word_in_a_string_or_a_comment_is_no_use(tmp_path: Path) -> None:
    assert (
        complaints(tree(tmp_path, "router/text.py", "# run_in_executor\nA = 'loop.run_in_executor'\n")) == []
    )
