"""Text that breaks its lines between words on a terminal while it arrives piece by piece."""

from __future__ import annotations

import unicodedata
from typing import TextIO

from rich.cells import cell_len

_TAB = 8


class WordWrap:
    """Writes text at once, and takes a word that does not fit back to begin it on the next line.

    width: columns of the terminal. Each character is shown or replaced: a model's escape sequences do not
    reach the terminal.
    """

    def __init__(self, out: TextIO, width: int) -> None:
        self._out = out
        # The last column stays free: a terminal that has filled it has an opinion of its own on where it is.
        self._width = max(1, width - 1)
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        """Shows a piece of the text."""
        self._out.write("".join(map(self._shown, text)))
        self._out.flush()

    def _shown(self, char: str) -> str:
        """What to send to the terminal for one character."""
        if char == "\n":
            return self._break()
        if char.isspace():
            return self._space(_TAB - self._column % _TAB if char == "\t" else 1)
        if unicodedata.category(char) in ("Cc", "Cs"):
            char = "\N{REPLACEMENT CHARACTER}"
        cells = cell_len(char)
        before = "" if self._column + cells <= self._width else self._wrapped()
        self._column += cells
        # Between two wide characters, as of Chinese, a line may break.
        self._word = "" if cells > 1 else self._word + char
        return before + char

    def _break(self) -> str:
        self._column = 0
        self._word = ""
        return "\n"

    def _space(self, columns: int) -> str:
        if self._column + columns > self._width:
            return self._break()
        self._column += columns
        self._word = ""
        return " " * columns

    def _wrapped(self) -> str:
        """Goes to the next line, with the word so far unless it has a whole line already."""
        word, cells = self._word, cell_len(self._word)
        if not 0 < cells < self._column:
            return self._break()
        self._column = cells
        return f"\x1b[{cells}D\x1b[K\n{word}"
