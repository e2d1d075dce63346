"""Says in one line what llguidance found wrong with a grammar, and where in the user's own text.

llguidance's messages quote the source as it rewrote it, over several lines. Only text goes
in and comes out here.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable

_MAX_REASON_CHARS = 300
_MAX_PLACE_CHARS = 200
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_REGEX_ERROR = re.compile(r"^error: (.+)", re.MULTILINE)
_CARET = re.compile(r"^ {4}( *)\^+", re.MULTILINE)
# The source with line numbers, and the marks under it.
_EXCERPT = re.compile(r"^ *(?:\d+ \| .*|\^+ *)$", re.MULTILINE)


def schema_reason(error: str, pointer: str) -> str:
    """What is wrong with a schema, at the place that SchemaPlaces found."""
    # The end of a long pointer says more than its beginning.
    place = pointer if len(pointer) <= _MAX_PLACE_CHARS else f"#...{pointer[-_MAX_PLACE_CHARS:]}"
    # The rest is advice to those who write a compiler, not a schema.
    reason = error.partition("\n  while processing ")[0].partition(" Enable 'coerce_one_of'")[0]
    return f"at {place}: {_reason(reason)}"


def regex_reason(error: str, source: str, rewrite: Callable[[str], str]) -> str:
    """What is wrong with a regex, and at which column of source.

    rewrite: how llguidance changes a regex before it reads it; a longer prefix is never rewritten to less.
    """
    caret = _CARET.search(error.partition("regex parse error:")[2])
    if caret is None:
        return _reason(_PLACE.sub("", error))
    column = _column(len(caret.group(1)), source, rewrite)
    return f"at column {column}: {_reason(error)}"


def lark_reason(error: str) -> str:
    """What is wrong with a Lark grammar, and at which line and column."""
    place = _PLACE.match(error)
    if place is None:
        return _reason(error)
    line, column = place.groups()
    return f"at line {line}, column {column}: {_reason(error[place.end() :])}"


def _column(num_before: int, source: str, rewrite: Callable[[str], str]) -> int:
    """The column, from 1, of what stands after num_before characters in the rewritten source."""
    ends = range(len(source))
    index = bisect.bisect_right(ends, num_before, key=lambda end: len(rewrite(source[:end]))) - 1
    # A backslash is written only with the character after it.
    while index > 0 and len(rewrite(source[: index - 1])) == len(rewrite(source[:index])):
        index -= 1
    return index + 1


def _reason(error: str) -> str:
    if "NoExtension" in error:
        return "no text matches it"
    error = error.partition("<non-verbose/>")[0]
    if "regex parse error:" in error and (found := _REGEX_ERROR.search(error)):
        return f"regular expression: {found.group(1)}"
    text = " ".join(_EXCERPT.sub("", error).split())
    text = re.sub(r"^invalid regex .* \(in regex\): ", "", text).partition(" in regex /")[0]
    return text[:_MAX_REASON_CHARS]
