"""A conversation with the model: the messages so far, and how the answers went. Knows no terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.answer import Summary
from baton.sync_client import Client

Message = dict[str, str]


class Conversation:
    """Messages so far, and the client that continues them.

    options: of every request, as Client.generate() takes them.
    """

    def __init__(self, client: Client, options: dict[str, Any], *, system: str | None = None) -> None:
        self._client = client
        self._options = options
        self.system = system
        self.exchanges: list[tuple[str, str]] = []
        self.summaries: list[Summary] = []
        # What was asked last, answered or not, and how long the history was then.
        self._asked: tuple[str, int] | None = None

    @property
    def messages(self) -> list[Message]:
        """All messages, the system's first."""
        first = [] if self.system is None else [_message("system", self.system)]
        pairs = [(_message("user", said), _message("assistant", answer)) for said, answer in self.exchanges]
        return first + [message for pair in pairs for message in pair]

    def say(self, text: str, show: Callable[[str], object]) -> Summary:
        """Sends a message and shows the answer as it comes; both are remembered only if it ends well."""
        self._asked = (text, len(self.exchanges))
        asked = [*self.messages, _message("user", text)]
        generation = self._client.generate(messages=asked, **self._options)
        parts = []
        for chunk in generation:
            show(chunk.text)
            parts.append(chunk.text)
        self.exchanges.append((text, "".join(parts)))
        self.summaries.append(generation.summary)
        return generation.summary

    def take_back(self) -> str | None:
        """Forgets the last exchange and returns what was asked; None if nothing was."""
        if self._asked is None:
            return None
        text, length = self._asked
        del self.exchanges[length:]
        return text

    def clear(self) -> None:
        """Forgets all but the system message."""
        self.exchanges.clear()
        self._asked = None


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
