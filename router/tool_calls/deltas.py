"""What comes out of an answer's text: content, and calls of functions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the text that the model says; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of a call.

    index: which of the answer's calls.
    id, name: of the call and its function; set where the call begins, else "".
    arguments: more of its arguments, which together are a JSON object; "" where the call begins.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


Delta = ContentDelta | CallDelta
