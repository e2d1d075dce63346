"""What is asked of a client, and what its report says: the words that all clients share.

Owns no process and no file format; each client's module knows its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a client sends its load.

    url: of the HTTP port, without a path.
    tokenizer: what clients cut their prompts with, a folder in the Hugging Face layout.
    """

    url: str
    model: str
    tokenizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One complete answer by the client's report. itl_ms: mean gap between its tokens."""

    num_prompt_tokens: int
    num_output_tokens: int
    ttft_ms: float
    itl_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run as the client tells it.

    num_cancelled: requests that the client itself gave up.
    errors: what the others that have no answer ended with.
    kept: the client's own figures, what is worth keeping of them.
    """

    answers: list[Answer]
    num_cancelled: int = 0
    errors: list[str] = field(default_factory=list)
    kept: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load.

    command: what is typed; its paths are relative to the folder that it runs in.
    num_requests: how many are sent; None where time ends the run.
    output_tokens: how long every answer must be.
    cancels: whether the client gives some requests up.
    read: makes a report of that folder.
    """

    name: str
    command: tuple[str, ...]
    num_requests: int | None
    output_tokens: int
    cancels: bool = False
    read: Callable[[Path], Report]


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A program that others wrote.

    package: what it is called where it is installed from.
    variables: added to its environment.
    runs: the loads for a target.
    metadata_of: a distribution that it looks itself up as, where it is installed as another.
    """

    name: str
    package: str
    variables: Mapping[str, str]
    runs: Callable[[Target], list[Run]]
    metadata_of: str | None = None
