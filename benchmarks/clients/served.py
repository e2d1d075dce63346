"""What a cluster did for each request, read from its own traces: the other side of a client's report.

Knows the spans of one request: `generate` holds QUEUED, which says how long the prompt is, and
DECODING, which says how many tokens came.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# An abandoned request ends at the next step of its worker; a machine that is busy takes longer.
SETTLED_S = 15.0
PAUSE_S = 0.1
QUIET_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request at its end. num_output_tokens is 0 where it ended before a decode worker had it."""

    num_prompt_tokens: int
    num_output_tokens: int


class Trace:
    """The spans that a cluster appends to a file, run by run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = 0

    def since(self, num_requests: int) -> list[Served]:
        """The requests that have ended since the last call, num_requests of them or more.

        Waits for them, as what a client has left ends a little later, and gives up after SETTLED_S.
        """
        until = time.monotonic() + SETTLED_S
        spans = self._spans()
        while len(requests_of(spans)) < num_requests and time.monotonic() < until:
            time.sleep(PAUSE_S)
            spans = self._spans()
        # The spans of one request come from several processes, each when it is through with it.
        known = -1
        while known < len(spans):
            known = len(spans)
            time.sleep(QUIET_S)
            spans = self._spans()
        self._known += len(spans)
        return requests_of(spans)

    def skip(self) -> None:
        """Forgets what has come so far: a client that failed has said nothing of it."""
        self._known += len(self._spans())

    def _spans(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        text = self._path.read_text(encoding="utf-8")
        # A line that is being written is read the next time.
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()[self._known :]]


def requests_of(spans: list[dict[str, Any]]) -> list[Served]:
    """Those whose `generate` has ended."""
    prompts = {_parent(span): _count(span, "num_tokens") for span in spans if span["name"] == "QUEUED"}
    outputs = {
        _parent(span): _count(span, "num_output_tokens") for span in spans if span["name"] == "DECODING"
    }
    return [
        Served(
            num_prompt_tokens=prompts.get(span["span_id"], 0),
            num_output_tokens=outputs.get(span["span_id"], 0),
        )
        for span in spans
        if span["name"] == "generate"
    ]


def _parent(span: dict[str, Any]) -> str:
    return str(span["parent_id"])


def _count(span: dict[str, Any], name: str) -> int:
    return int(span["attributes"].get(f"baton.{name}", 0))
