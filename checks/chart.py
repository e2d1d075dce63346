"""Compares the chart's generated files with what they are made of: `python -m checks.chart [--write]`.

Its README's table and values.schema.json come from values.yaml; each example of values has the manifests that
it gives beside the tests, so that a change of the chart is read as a change of objects.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from checks.chart_render import render
from checks.chart_values import CHART, written

# Data of the Secrets whose values are random.
_MADE = re.compile(r"^(  (?:auth_token|password)): [A-Za-z0-9+/=]+$", re.MULTILINE)
GOLDEN = Path(__file__).parent.parent / "tests" / "deploy" / "golden"


def main() -> int:
    """Writes, or names the files that differ."""
    expected = written()
    if "--write" in sys.argv[1:]:
        _write(expected)
    expected |= golden()
    if "--write" in sys.argv[1:]:
        _write(expected)
        return 0
    wrong = [path for path, text in expected.items() if not path.is_file() or path.read_text() != text]
    wrong += set(GOLDEN.glob("*/*")) - set(expected)
    for path in wrong:
        print(f"{path}: is not what the chart gives; run python -m checks.chart --write and read it")
    return bool(wrong)


def golden() -> dict[Path, str]:
    """The manifests of the defaults and of each example, a file each."""
    files = {}
    for name, values in {
        "defaults": None,
        **{path.stem: path for path in CHART.glob("examples/*.yaml")},
    }.items():
        for template, text in render([values] if values else []).items():
            files[GOLDEN / name / template] = _MADE.sub(r"\1: <made at the first installation>", text)
    return files


def _write(files: Mapping[Path, str]) -> None:
    for path in set(GOLDEN.glob("*/*")) - set(files):
        path.unlink()
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
