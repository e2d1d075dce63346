"""Runs the Python of documents and docstrings, so that what they show is what happens.

A ```python block of a document is a program; one that says ```python no-run is only shown. If a ```text block
follows it, with nothing but blank lines between, that is what the program prints. Examples in docstrings
are written as at the prompt of `python -m asyncio`. Both may await outside of a function, both may leave out
output with `...`, and both reach the router that a test plays at the address that they name.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(
    r"^```python(?P<flags>[^\n]*)\n(?P<code>.*?)^```\n"
    r"(?:\s*^```text\n(?P<out>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Snippet:
    """A program in a document.

    place: file and line.  printed: what it prints, as the document says; None where it says nothing.
    """

    place: str
    code: str
    printed: str | None

    def run(self, addresses: Mapping[str, str]) -> str:
        """What it prints; raises as it does. addresses: what stands in the document, and what is meant."""
        code = compile(_at(self.code, addresses), self.place, "exec", flags=_FLAGS, dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as out, asyncio.Runner() as runner:
            _run(code, {"__name__": "__main__"}, runner)
        return out.getvalue()


def blocks(path: Path) -> list[Snippet]:
    """The programs of a document, in their order."""
    text = path.read_text(encoding="utf-8")
    found = [match for match in _BLOCK.finditer(text) if "no-run" not in match["flags"]]
    return [
        Snippet(f"{path.name}:{text.count(chr(10), 0, match.start()) + 1}", match["code"], match["out"])
        for match in found
    ]


def is_printed(printed: str, expected: str) -> bool:
    """Whether a program printed what its document says."""
    return doctest.OutputChecker().check_output(expected, printed, _OPTIONS)


def examples(module: ModuleType) -> list[doctest.DocTest]:
    """The docstrings of a module that show examples."""
    tests = doctest.DocTestFinder().find(module)
    return [test for test in tests if any(not _is_skipped(example) for example in test.examples)]


def differences(test: doctest.DocTest, addresses: Mapping[str, str]) -> list[str]:
    """Runs a docstring's examples one after another; where what they print is not what they say.

    They know the names of their module.
    """
    found, names = [], dict(test.globs)
    with asyncio.Runner() as runner:
        for example in test.examples:
            if _is_skipped(example):
                continue
            source = _at(example.source, addresses)
            code = compile(source, test.name, "single", flags=_FLAGS, dont_inherit=True)
            said = example.want if example.exc_msg is None else example.exc_msg
            if not is_printed(got := _print_or_raise(code, names, runner), said):
                found.append(f"{test.name}:\n{example.source}expected:\n{said}got:\n{got}")
    return found


def _print_or_raise(code: Any, names: dict[str, Any], runner: asyncio.Runner) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            _run(code, names, runner)
        except Exception as error:  # noqa: BLE001 - an example may show any
            return traceback.format_exception_only(error)[-1]
    return out.getvalue()


def _run(code: Any, names: dict[str, Any], runner: asyncio.Runner) -> None:
    result = eval(code, names)
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(result)


def _is_skipped(example: doctest.Example) -> bool:
    return bool(example.options.get(doctest.SKIP))


def _at(source: str, addresses: Mapping[str, str]) -> str:
    for written, meant in addresses.items():
        source = source.replace(written, meant)
    return source
