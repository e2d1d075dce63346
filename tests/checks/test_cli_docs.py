"""docs/cli.md says what the commands say."""

from __future__ import annotations

import re
import shlex

import pytest

from baton.cli.commands import COMMANDS
from baton.cli.exit_codes import EXIT_CODES
from baton.exit_status import FAILED, UNUSABLE_MODEL, WRONG_SETTING
from checks import cli_docs


@pytest.fixture(scope="module")
def text() -> str:
    return cli_docs.PATH.read_text(encoding="utf-8")


def test_the_reference_is_fresh(text) -> None:
    assert cli_docs.fresh(text) == text, "run python -m checks.cli_docs --write"


def test_every_exit_code_is_there(text) -> None:
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", text, re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES


def test_the_exit_statuses_of_roles_are_there(text) -> None:
    rows = re.findall(r"^\| `(\d)` \|", text, re.MULTILINE)
    assert set(map(int, rows)) == {0, FAILED, WRONG_SETTING, UNUSABLE_MODEL}


def test_every_option_that_the_text_names_exists(text) -> None:
    prose, _, reference = text.partition(cli_docs.BEGIN)
    known = {*re.findall(r"--[a-z][a-z-]+", reference), "--help", "--debug", "--no-color"}
    known |= {"--install-completion", "--show-completion"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose)) <= known


def test_every_example_can_be_parsed(text) -> None:
    prose, _, _ = text.partition(cli_docs.BEGIN)
    blocks = "\n".join(re.findall(r"```\n(.*?)```", prose, re.DOTALL))
    examples = re.findall(r"^baton .*$", blocks, re.MULTILINE) + re.findall(r"`(baton [^`]+)`", prose)
    assert len(examples) > 10
    entries = {entry.name: entry for entry in COMMANDS}
    for example in examples:
        _, name, *arguments = shlex.split(example.partition("|")[0])
        # A command alone is its name.
        if name in entries and arguments:
            # Raises for an option that is not there, or a value that it cannot have.
            entries[name].load().make_context(name, arguments)


def test_a_document_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the markers"):
        cli_docs.fresh("# Something else")


def test_a_stale_reference_is_told(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "cli.md"
    path.write_text(f"a\n{cli_docs.BEGIN}\nstale words\n{cli_docs.END}\nb\n", encoding="utf-8")
    monkeypatch.setattr(cli_docs, "PATH", path)
    assert cli_docs.main([]) == 1
    assert cli_docs.main(["--write"]) == 0
    assert cli_docs.main([]) == 0
    written = path.read_text(encoding="utf-8")
    assert written.startswith("a\n")
    assert written.endswith("\nb\n")
    assert "stale words" not in written
