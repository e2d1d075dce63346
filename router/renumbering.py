"""Numbers instead of names: first seen is 1, then 2, and so on. A synchronous core, bounded.

What was not seen for long is forgotten, and gets a new number if it comes again.
"""

from __future__ import annotations

from collections.abc import Iterable

# About 35 MB at worst, of 16-byte keys.
MAX_KNOWN = 1 << 18


class Renumbering:
    """The table: at most max_known names, two generations of half of them each.

    A name that is asked for moves to the younger; when that is full it becomes the older, and what was the
    older is forgotten. So the max_known / 2 names asked for last are always known.
    """

    def __init__(self, *, max_known: int = MAX_KNOWN) -> None:
        self._half = max(1, max_known // 2)
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def number(self, name: bytes) -> int:
        """The number of a name, at least 1."""
        found = self._young.get(name)
        if found is not None:
            return found
        found = self._old.pop(name, None)
        if found is None:
            found = self._last = self._last + 1
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[name] = found
        return found

    def runs(self, names: Iterable[bytes]) -> list[list[int]]:
        """The numbers of names in order, as runs [first number, count] of successive numbers."""
        runs: list[list[int]] = []
        for number in map(self.number, names):
            if runs and number == runs[-1][0] + runs[-1][1]:
                runs[-1][1] += 1
            else:
                runs.append([number, 1])
        return runs
