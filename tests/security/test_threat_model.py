"""The threat model names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_row_names_tests_and_each_of_them_is_there() -> None:
    rows = [line for line in (ROOT / "docs/security.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| boundary")]
    assert len(rows) >= 18
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, f"no test stands for: {row}"
        for path, name in named:
            text = (ROOT / path).read_text()
            assert re.search(rf"def {name}\(", text), f"{path} has no {name}"
