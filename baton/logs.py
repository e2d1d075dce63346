"""Structured logs: one event per line, on standard error or in a file.

Owns the one configuration of structlog and of the standard library's logging.
It must never see a prompt, a completion or a key: fields that by their name
would hold one are withheld, whatever the caller passes.

Modules write `log = get_logger(__name__)` and `log.info("worker ready", worker=name)`.
Without configure_logging() such events go to the standard library's loggers, so
a program that only uses the SDK keeps its own logging set-up.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final, cast

import structlog
from structlog.typing import Processor

from baton.errors import ConfigError

LEVELS: Final = ("debug", "info", "warning", "error")
_WITHHELD: Final = frozenset(
    {"prompt", "completion", "messages", "text", "token_ids", "prompt_token_ids"}
    | {"api_key", "authorization", "password", "salt", "secret"}
)


def _withhold(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name in _WITHHELD.intersection(event):
        event[name] = "[withheld]"
    return event


_SHARED: Final[tuple[Processor, ...]] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.stdlib.PositionalArgumentsFormatter(),
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    structlog.processors.StackInfoRenderer(),
    _withhold,
)
_EVENT: Final[tuple[Processor, ...]] = (
    structlog.stdlib.filter_by_level,
    *_SHARED,
    structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose methods take an event name and fields."""
    logger = structlog.wrap_logger(
        logging.getLogger(name), processors=list(_EVENT), wrapper_class=structlog.stdlib.BoundLogger
    )
    return cast("structlog.stdlib.BoundLogger", logger)


def configure_logging(role: str, level: str = "info", file: str | Path | None = None) -> None:
    """Sends all logs of this process to standard error, or to a file instead.

    Lines are JSON, except on a terminal, where they are key=value for people. Call once, at the
    entry point; calling again replaces the previous set-up.

    Args:
        role: the process's name, for example "prefill-0"; every line carries it.
        level: one of LEVELS.
        file: path to append to.

    Raises:
        ConfigError: the level is unknown or the file cannot be opened.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is unknown; allowed: {', '.join(LEVELS)}", field="log_level")
    handler = _handler(file)
    is_terminal = file is None and sys.stderr.isatty()
    handler.setFormatter(_formatter(role, is_terminal=is_terminal))
    root = logging.getLogger()
    for previous in root.handlers[:]:
        root.removeHandler(previous)
        previous.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    structlog.configure(
        processors=list(_EVENT),
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _handler(file: str | Path | None) -> logging.Handler:
    if file is None:
        return logging.StreamHandler(sys.stderr)
    try:
        # What a log tells is its owner's.
        os.close(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
        return logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"log file {file} cannot be opened: {error.strerror}", field="log_file") from None


def _formatter(role: str, *, is_terminal: bool) -> logging.Formatter:
    def add_role(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("role", role)
        return event

    renderers: list[Processor] = [structlog.dev.ConsoleRenderer()]
    if not is_terminal:
        renderers = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder(), _withhold],
        processors=[add_role, structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
    )
