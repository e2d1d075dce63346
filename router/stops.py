"""Stop strings, found in a text that comes in pieces.

An Aho-Corasick automaton over the stops. Its state after some text is the longest
suffix of that text which is a proper prefix of some stop: exactly what could still
become one, and so exactly what is held back. The result does not depend on how the
text is cut into pieces. Knows neither tokens nor requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 256


@dataclass(slots=True)
class _Node:
    """A prefix of some stop.

    fallback: node of the longest proper suffix that is such a prefix too.
    stop: the longest stop that this prefix ends with, or "".
    """

    depth: int
    children: dict[str, _Node]
    fallback: _Node | None = None
    stop: str = ""


class StopAutomaton:
    """The stops of one request; immutable, shared by its answers.

    Raises InvalidRequest for too many stops, or one of a length that is not allowed.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > MAX_STOPS:
            raise InvalidRequest(f"stop has {len(stops)} texts; send at most {MAX_STOPS}", field="stop")
        if not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise InvalidRequest(f"each stop must have 1 to {MAX_STOP_CHARS} characters", field="stop")
        self.root = _Node(0, {})
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, node: _Node, char: str) -> _Node:
        """The state after one more character."""
        here: _Node | None = node
        while here is not None:
            if char in here.children:
                return here.children[char]
            here = here.fallback
        return self.root

    def _insert(self, stop: str) -> None:
        node = self.root
        for depth, char in enumerate(stop, start=1):
            node = node.children.setdefault(char, _Node(depth, {}))
        node.stop = stop

    def _link(self) -> None:
        """Sets fallbacks breadth first, so that shorter prefixes are ready before longer ones."""
        waiting = deque([self.root])
        while waiting:
            node = waiting.popleft()
            for char, child in node.children.items():
                child.fallback = self.root if node.fallback is None else self.step(node.fallback, char)
                child.stop = child.stop or child.fallback.stop
                waiting.append(child)


class StopScanner:
    """Passes the text of one answer on, up to the first stop.

    The stop that ends first is the one; of several that end there, the longest.
    include_stop: the text goes up to the end of the stop, so nothing needs to be held back.
    matched: the stop that was found, or "".
    """

    def __init__(self, automaton: StopAutomaton, *, include_stop: bool = False) -> None:
        self.matched = ""
        self._automaton = automaton
        self._include_stop = include_stop
        self._state = automaton.root
        self._held = ""

    def push(self, text: str) -> str:
        """What can be passed on after this text; not to be called after a match."""
        for position, char in enumerate(text, start=1):
            self._state = self._automaton.step(self._state, char)
            if self._state.stop:
                self.matched = self._state.stop
                whole = self._held + text[:position]
                self._held = ""
                return whole if self._include_stop else whole[: len(whole) - len(self.matched)]
        whole = self._held + text
        kept = len(whole) - (0 if self._include_stop else self._state.depth)
        self._held = whole[kept:]
        return whole[:kept]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held
