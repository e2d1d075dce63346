"""The text of one answer: detokenized, cut at a stop, without what its client has already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.stops import StopAutomaton, StopScanner
from router.text_stream import TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What a request says about the text of its answers.

    stops: texts that end an answer, or None.
    include_stop: the text goes up to the end of the stop.
    skip_special_tokens: special tokens are left out of the text.
    keep_tool_markers: but for those that mark calls of tools.
    """

    stops: StopAutomaton | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    keep_tool_markers: bool = False


class AnswerText:
    """Turns the tokens of one answer into its text.

    stream: its detokenizer, fresh.
    min_tokens: text that comes with the first that many tokens is not searched for stops.
    num_delivered_chars: code points at the beginning of the text that the client has.
    num_tokens: tokens of the answer so far, up to and including the one that completed a stop.
    """

    def __init__(
        self, stream: TextStream, options: TextOptions, *, min_tokens: int = 0, num_delivered_chars: int = 0
    ) -> None:
        self.num_tokens = 0
        self._stream = stream
        self._min_tokens = min_tokens
        self._num_delivered_chars = num_delivered_chars
        self._due = ""
        self._scanner: StopScanner | None = None
        if options.stops is not None:
            self._scanner = StopScanner(options.stops, include_stop=options.include_stop)

    @property
    def matched_stop(self) -> str:
        """The stop that was found, or ""."""
        return "" if self._scanner is None else self._scanner.matched

    def replay(self, token_ids: Sequence[int]) -> None:
        """Takes in the tokens that the client has; text of theirs that it has not comes with the next."""
        self._due = self.push(token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete. Tokens after a stop are no part of the answer."""
        parts = []
        for token_id in token_ids:
            if self.matched_stop:
                break
            self.num_tokens += 1
            parts.append(self._scan(self._stream.push([token_id])))
        return self._take_due() + self._undelivered("".join(parts))

    def flush(self) -> str:
        """What was held back, once no more tokens come."""
        if self.matched_stop:
            return self._take_due()
        text = self._scan(self._stream.flush())
        if self._scanner is not None:
            text += self._scanner.flush()
        return self._take_due() + self._undelivered(text)

    def _take_due(self) -> str:
        due, self._due = self._due, ""
        return due

    def _scan(self, text: str) -> str:
        if self._scanner is None or self.num_tokens <= self._min_tokens:
            return text
        return self._scanner.push(text)

    def _undelivered(self, text: str) -> str:
        known = min(self._num_delivered_chars, len(text))
        self._num_delivered_chars -= known
        return text[known:]
