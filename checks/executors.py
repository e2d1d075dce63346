"""No core or shell hands work to an executor of its event loop.

ruff bans names (banned-api in pyproject.toml), but it does not see a method of a value, as in
`loop.run_in_executor(...)`. This check does, in every file that pyproject.toml does not exempt
from those bans (TID251 under per-file-ignores).
"""

from __future__ import annotations

import ast
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from checks.size import PACKAGES

METHODS = frozenset({"run_in_executor", "set_default_executor"})
BAN = "TID251"


def exempt_patterns(root: Path) -> list[str]:
    """Patterns of the files that ruff exempts from the bans; `*` in them matches `/` too."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    ignores = settings["tool"]["ruff"]["lint"]["per-file-ignores"]
    return [pattern for pattern, codes in ignores.items() if BAN in codes]


def complaints(root: Path) -> list[str]:
    """Uses of an executor where there may be none, in words."""
    patterns = exempt_patterns(root)
    paths = [path.relative_to(root) for name in PACKAGES for path in sorted((root / name).rglob("*.py"))]
    return [
        f"{path}:{line}: {method} is a thread; take what runs the work as an argument"
        for path in paths
        if not any(fnmatch(path.as_posix(), pattern) for pattern in patterns)
        for line, method in _uses(root / path)
    ]


def main() -> int:
    """Prints what was found; 1 if that is anything."""
    found = complaints(Path())
    print("".join(f"  {complaint}\n" for complaint in found), end="")
    print(f"executors: {len(found)} uses outside of the edges")
    return 1 if found else 0


def _uses(path: Path) -> list[tuple[int, str]]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [(n.lineno, n.attr) for n in nodes if isinstance(n, ast.Attribute) and n.attr in METHODS]


if __name__ == "__main__":
    sys.exit(main())
