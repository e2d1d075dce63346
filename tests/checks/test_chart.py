"""Generated files of the chart that are not what it gives are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks import chart


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the manifests of a chart that has one template, no examples and nothing generated."""
    monkeypatch.setattr(chart, "GOLDEN", tmp_path / "golden")
    monkeypatch.setattr(chart, "CHART", tmp_path / "chart")
    monkeypatch.setattr(chart, "written", dict)
    made = {"a.yaml": "kind: Secret\ndata:\n  password: c29tZXRoaW5nIHJhbmRvbQ==\n", "NOTES.txt": "next\n"}
    monkeypatch.setattr(chart, "render", lambda _files: made)
    monkeypatch.setattr("sys.argv", ["chart", "--write"])
    assert chart.main() == 0
    monkeypatch.setattr("sys.argv", ["chart"])
    return tmp_path / "golden" / "defaults"


def test_what_was_written_passes_and_holds_nothing_random(golden: Path) -> None:
    assert chart.main() == 0
    assert sorted(path.name for path in golden.iterdir()) == ["NOTES.txt", "a.yaml"]
    assert (golden / "a.yaml").read_text().endswith("  password: <made at the first installation>\n")


@pytest.mark.parametrize("name", ["a.yaml", "NOTES.txt"])
def test_a_file_that_differs_is_named(golden: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (golden / name).write_text("other\n")
    assert chart.main() == 1
    assert f"{golden / name}: is not what the chart gives" in capsys.readouterr().out


def test_a_file_that_is_missing_or_of_no_template_is_named(
    golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (golden / "a.yaml").rename(golden / "old.yaml")
    assert chart.main() == 1
    shown = capsys.readouterr().out
    assert str(golden / "old.yaml") in shown
    assert str(golden / "a.yaml") in shown
