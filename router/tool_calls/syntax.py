"""How calls stand in the text of an answer, and where one of them ends.

Text comes in pieces. Whether a beginning is still open, whole or broken depends on the text so far
alone, and never changes back, so the result does not depend on how the text is cut.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

MAX_DEPTH = 100
_SPACE = " \t\r\n"
# All that JSON has outside of strings.
_OUTSIDE = frozenset(_SPACE + '{}[]:,"' + "0123456789+-.eE" + "truefalsn")
# Without a marker, an object that begins otherwise is no call.
_FIRST_KEYS = ('"name"', '"type"')
_HEAD_CHARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Where calls stand: a JSON value between two markers.

    begin, end: the markers; `end` may be "".
    opening: what the value begins with: "{" for one call, "[" for a list of calls.
    arguments_keys: names of the arguments in a call; the first is the model's own.
    is_bare: an object at the beginning of the answer, or after another one, is a call without a marker too.
    """

    begin: str
    end: str
    opening: str
    arguments_keys: tuple[str, ...]
    is_bare: bool = False

    def calls(self, text: str, names: Collection[str]) -> list[tuple[str, str]]:
        """Name and arguments (a JSON object) of each call in a value; none if it is anything else.

        names: the functions that there are.
        """
        try:
            # Models write bare line breaks into strings.
            value = json.loads(text, strict=False)
            calls = [self._call(item) for item in (value if isinstance(value, list) else [value])]
        except (ValueError, KeyError, TypeError, RecursionError):
            return []
        return calls if all(name in names for name, _ in calls) else []

    def _call(self, item: dict[str, object]) -> tuple[str, str]:
        name = item["name"]
        arguments = next((item[key] for key in self.arguments_keys if key in item), None)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError("this is no call")
        return name, _written(arguments)


class State(Enum):
    """What is known of a call whose beginning has been read."""

    OPEN = auto()
    WHOLE = auto()
    BROKEN = auto()


class CallScan:
    """Finds the end of one call in a text that grows.

    start: where it begins, after its marker.
    is_bare: it has none.
    value_start, value_end: where the JSON value stands, once it is whole.
    end: where the call ends, once it is.
    """

    def __init__(self, syntax: CallSyntax, start: int, *, is_bare: bool) -> None:
        self.value_start = start
        self.value_end = 0
        self.end = 0
        self._syntax = syntax
        self._is_bare = is_bare
        self._position = start
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def has_value(self) -> bool:
        """Whether the JSON value is whole, so that only the marker after it may be missing."""
        return self.value_end > 0

    def extend(self, text: str) -> State:
        """The state after this text, which is the earlier one or begins with it."""
        if self._depth == 0 and not self.has_value:
            state = self._open(text)
            if state is not State.WHOLE:
                return state
        if self._depth > 0:
            state = self._read_value(text)
            if state is not State.WHOLE:
                return state
        return self._close(text)

    def _open(self, text: str) -> State:
        self._position = _skip_space(text, self._position)
        if self._position == len(text):
            return State.OPEN
        if text[self._position] != self._syntax.opening:
            return State.BROKEN
        self.value_start = self._position
        self._position += 1
        self._depth = 1
        return State.WHOLE

    def _read_value(self, text: str) -> State:
        if self._is_bare and not self._may_be_call(text):
            return State.BROKEN
        while self._position < len(text):
            char = text[self._position]
            self._position += 1
            if self._in_string:
                self._read_in_string(char)
            elif char not in _OUTSIDE or self._depth > MAX_DEPTH:
                return State.BROKEN
            elif char == '"':
                self._in_string = True
            else:
                self._depth += (char in "{[") - (char in "}]")
                if self._depth == 0:
                    self.value_end = self._position
                    return State.WHOLE
        return State.OPEN

    def _read_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False

    def _may_be_call(self, text: str) -> bool:
        head = text[self.value_start + 1 : self.value_start + 1 + _HEAD_CHARS]
        key = head.lstrip(_SPACE)
        return len(head) - len(key) < _HEAD_CHARS and any(
            first.startswith(key[: len(first)]) for first in _FIRST_KEYS
        )

    def _close(self, text: str) -> State:
        end = self._syntax.end
        self.end = self.value_end
        if not end:
            return State.WHOLE
        self._position = _skip_space(text, self._position)
        if text.startswith(end, self._position):
            self.end = self._position + len(end)
            return State.WHOLE
        begun = text[self._position : self._position + len(end)]
        return State.OPEN if end.startswith(begun) else State.BROKEN


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _written(arguments: dict[str, object]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a pair of surrogates can only be written as an escape.
        return json.dumps(arguments, allow_nan=False)
    return text
