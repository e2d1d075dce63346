"""The size report: functions and files stay small enough to be read at once.

A function is measured from its `def` line to its last, without its docstring:
documenting a function must not make it too long. A Triton kernel, a function
that is decorated with `jit`, may be longer.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    "baton",
    "engine",
    "kvtransfer",
    "prefill_worker",
    "decode_worker",
    "router",
    "benchmarks",
    "checks",
)
GENERATED = Path("baton/v1")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 100
MAX_MEDIAN_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function of the source and its length in lines."""

    place: str
    num_lines: int
    is_kernel: bool

    @property
    def is_too_long(self) -> bool:
        """Whether it is over its limit."""
        return self.num_lines > (MAX_KERNEL_LINES if self.is_kernel else MAX_FUNCTION_LINES)


def functions(path: Path) -> Iterator[Function]:
    """Every function and method of a file, nested ones too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(
                place=f"{path}:{node.lineno} {node.name}",
                num_lines=_length(node),
                is_kernel=any("jit" in ast.unparse(decorator) for decorator in node.decorator_list),
            )


def complaints(root: Path) -> list[str]:
    """What is too long in the packages and the tests, in words."""
    files = [path for name in (*PACKAGES, "tests") for path in _sources(root / name, root)]
    found = [
        f"{path}: {num_lines} lines, at most {MAX_FILE_LINES}"
        for path in files
        if (num_lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    ]
    found += [
        f"{function.place}: {function.num_lines} lines, too long"
        for path in files
        for function in functions(path)
        if function.is_too_long
    ]
    return found


def main() -> int:
    """Prints the report; 1 if something is too long."""
    root = Path()
    lengths = [
        f.num_lines for name in PACKAGES for path in _sources(root / name, root) for f in functions(path)
    ]
    median = statistics.median(lengths)
    found = complaints(root)
    if median > MAX_MEDIAN_LINES:
        found.append(f"the median function has {median:g} lines, at most {MAX_MEDIAN_LINES}")
    print(f"size: {len(lengths)} functions, median {median:g} lines, longest {max(lengths)} lines")
    print("".join(f"  {complaint}\n" for complaint in found), end="")
    return 1 if found else 0


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    end = node.end_lineno or node.lineno
    num_lines = end - node.lineno + 1
    if ast.get_docstring(node) is None:
        return num_lines
    docstring = node.body[0]
    return num_lines - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def _sources(folder: Path, root: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if root / GENERATED not in path.parents]


if __name__ == "__main__":
    sys.exit(main())
