"""Streamed text against a terminal of a few lines of Python: what is on the screen in the end."""

from __future__ import annotations

import io
import random
import re
import textwrap

import pytest

from baton.cli.word_wrap import WordWrap


def screen(sent: str) -> list[str]:
    """The lines that a wide terminal shows: it goes back and erases where it is told to."""
    lines, column = [""], 0
    for piece in re.findall(r"\x1b\[\d+D|\x1b\[K|.|\n", sent):
        if piece == "\n":
            lines.append("")
            column = 0
        elif piece == "\x1b[K":
            lines[-1] = lines[-1][:column]
        elif piece.startswith("\x1b"):
            column -= int(piece[2:-1])
        else:
            lines[-1] = lines[-1][:column] + piece
            column += 1
    return [line.rstrip() for line in lines]


def shown(text: str, width: int, rng: random.Random | None = None) -> list[str]:
    out = io.StringIO()
    wrap = WordWrap(out, width)
    while text:
        size = 1 if rng is None else rng.randint(1, 7)
        wrap.write(text[:size])
        text = text[size:]
    return screen(out.getvalue())


@pytest.mark.parametrize("seed", range(5))
def test_lines_break_where_a_library_that_has_the_whole_text_breaks_them(seed: int) -> None:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abc", k=rng.randint(1, 9))) for _ in range(60)]
    # The last column stays free.
    assert shown(" ".join(words), 21, rng) == textwrap.wrap(" ".join(words), 20)


def test_a_word_longer_than_a_line_fills_lines() -> None:
    assert shown("a bcdefghijkl m", 6) == ["a", "bcdef", "ghijk", "l m"]


def test_line_breaks_and_indentation_are_kept() -> None:
    assert shown("def f():\n    return 1\n\nEnd", 40) == ["def f():", "    return 1", "", "End"]


def test_wide_characters_take_two_columns_and_may_be_parted() -> None:
    assert shown("\u4f60\u597d\u4e16\u754c", 5) == ["\u4f60\u597d", "\u4e16\u754c"]


def test_escape_sequences_of_the_model_do_not_reach_the_terminal() -> None:
    out = io.StringIO()
    WordWrap(out, 80).write("a\x1b[2Jb\x07\r\n")
    assert out.getvalue() == "a\ufffd[2Jb\ufffd \n"
