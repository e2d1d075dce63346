"""Reads the calls out of the text of one answer, as it comes.

Text passes at once, but for what could still become a call. What turns out to be no call stays text,
so nothing is lost but the markers of calls and white space beside them.
"""

from __future__ import annotations

import random
import string
from collections.abc import Collection

from router.tool_calls.deltas import CallDelta, ContentDelta, Delta
from router.tool_calls.syntax import CallScan, CallSyntax, State

_ALPHANUMERIC = string.ascii_letters + string.digits


class ToolCallParser:
    """The reader of one answer.

    names: the functions that there are; a call of another one stays text.
    rng: source of the calls' ids.
    id_prefix, num_id_chars: their shape: the prefix and that many letters and digits.
    parallel: otherwise calls after the first are left out.

    The result does not depend on how the text is cut into pieces.
    """

    def __init__(
        self,
        syntax: CallSyntax,
        names: Collection[str],
        rng: random.Random,
        *,
        id_prefix: str,
        num_id_chars: int,
        parallel: bool = True,
    ) -> None:
        self.num_calls = 0
        self._syntax = syntax
        self._names = frozenset(names)
        self._rng = rng
        self._id_prefix = id_prefix
        self._num_id_chars = num_id_chars
        self._parallel = parallel
        # Text that is dealt with up to _at, the marker of a call that has begun included. It is cut off there
        # at the end of a push only: at every step it could take the square of its length.
        self._held = ""
        self._at = 0
        # White space at the beginning of the text, or after a call: dropped if a call follows.
        self._space = ""
        self._is_at_start = True
        self._scan: CallScan | None = None
        self._marker = ""
        self._said: list[str] = []
        self._deltas: list[Delta] = []

    def push(self, text: str) -> list[Delta]:
        """What this text completes."""
        self._held += text
        return self._advance(is_last=False)

    def flush(self) -> list[Delta]:
        """What was held back, once no more text comes. A call that lacks only its last marker is one."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> list[Delta]:
        while self._read_text(is_last) if self._scan is None else self._read_call(self._scan, is_last):
            pass
        if self._scan is None:
            self._held, self._at = self._held[self._at :], 0
        if is_last and self._is_at_start and self.num_calls == 0:
            self._say("")
        self._end_content()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read_text(self, is_last: bool) -> bool:
        """Passes text on up to the next call; whether one begins."""
        if self._is_at_start:
            self._take_space()
            if self._syntax.is_bare and self._held.startswith(self._syntax.opening, self._at):
                self._begin("")
                return True
        begin = self._syntax.begin
        place = self._held.find(begin, self._at)
        if place >= 0:
            self._pass_on(place)
            self._at += len(begin)
            self._begin(begin)
            return True
        num_kept = (
            0 if is_last else _num_begun(self._held[max(self._at, len(self._held) - len(begin)) :], begin)
        )
        self._pass_on(len(self._held) - num_kept)
        return False

    def _read_call(self, scan: CallScan, is_last: bool) -> bool:
        """Reads on in a call; whether it has ended, well or not."""
        state = scan.extend(self._held)
        if state is State.OPEN and is_last:
            state = State.WHOLE if scan.has_value else State.BROKEN
            scan.end = len(self._held)
        if state is State.OPEN:
            return False
        self._scan = None
        calls = []
        if state is State.WHOLE:
            value = self._held[scan.value_start : scan.value_end]
            calls = self._syntax.calls(value, self._names)
        if calls:
            self._call(calls)
            self._at = scan.end
        elif self._marker:
            self._say(self._marker)
        else:
            self._pass_on(self._at + 1)
        return True

    def _begin(self, marker: str) -> None:
        self._marker = marker
        self._scan = CallScan(self._syntax, self._at, is_bare=not marker)

    def _call(self, calls: list[tuple[str, str]]) -> None:
        self._end_content()
        for name, arguments in calls:
            if self._parallel or self.num_calls == 0:
                drawn = "".join(self._rng.choices(_ALPHANUMERIC, k=self._num_id_chars))
                self._deltas.append(CallDelta(self.num_calls, f"{self._id_prefix}{drawn}", name))
                self._deltas.append(CallDelta(self.num_calls, arguments=arguments))
                self.num_calls += 1
        self._space = ""
        self._is_at_start = True

    def _take_space(self) -> None:
        # Models that write objects without markers put semicolons between them.
        between = ";" if self._syntax.is_bare and self.num_calls else ""
        begun = self._at
        while self._at < len(self._held) and (
            self._held[self._at].isspace() or self._held[self._at] in between
        ):
            self._at += 1
        self._space += self._held[begun : self._at]

    def _pass_on(self, place: int) -> None:
        """Takes the text up to a place for content."""
        if place > self._at:
            self._say(self._held[self._at : place])
            self._at = place

    def _say(self, text: str) -> None:
        self._said += (self._space, text)
        self._space = ""
        self._is_at_start = False

    def _end_content(self) -> None:
        said = "".join(self._said)
        self._said = []
        if said:
            self._deltas.append(ContentDelta(said))


def _num_begun(text: str, marker: str) -> int:
    """Length of the longest end of the text with which the marker could begin."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((length for length in lengths if marker.startswith(text[-length:])), 0)
