"""The ways of the requests in flight and of the last that ended, for whoever asks why."""

from __future__ import annotations

from collections import OrderedDict

from router.timeline import Timeline

MAX_ENDED = 1000


class Explanations:
    """Timelines by request id, one per answer. Of ended requests the last max_ended stay."""

    def __init__(self, max_ended: int = MAX_ENDED) -> None:
        self._max_ended = max_ended
        self._running: dict[str, list[Timeline]] = {}
        self._ended: OrderedDict[str, list[Timeline]] = OrderedDict()

    def begin(self, request_id: str) -> list[Timeline]:
        """A request has come; its answers are to be appended. Of several of one id the last stands for it."""
        answers = self._running[request_id] = []
        return answers

    def end(self, request_id: str, answers: list[Timeline]) -> None:
        """That request is over."""
        if self._running.get(request_id) is answers:
            del self._running[request_id]
        self._ended.pop(request_id, None)
        self._ended[request_id] = answers
        if len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def find(self, request_id: str) -> list[Timeline]:
        """Of that request, or, for "", of the one that ended last; empty if it is not known."""
        if not request_id:
            return next(reversed(self._ended.values()), [])
        return self._running.get(request_id) or self._ended.get(request_id, [])
