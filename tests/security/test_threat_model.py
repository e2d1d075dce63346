"""The threat model names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_each_threat_has_a_test() -> None:
    table = PAGE.partition("| boundary |")[2].partition("\n\n")[0]
    rows = [line for line in table.splitlines()[2:] if line.startswith("| ")]
    assert len(rows) >= 24
    assert [row for row in rows if row.count("|") != 5 or not NAMED.search(row)] == []


def test_each_test_that_is_named_is_there() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) >= 40
    texts = {path: (ROOT / path).read_text() for path, _ in named}
    assert [f"{path}::{name}" for path, name in named if f"def {name}(" not in texts[path]] == []


def test_each_file_that_is_named_is_there() -> None:
    named = re.findall(
        r"`((?:baton|router|kvtransfer|engine|decode_worker|prefill_worker|deploy)/[\w./-]*)`", PAGE
    )
    assert len(named) >= 15
    assert [path for path in named if not (ROOT / path).exists()] == []
