"""What a line of log looks like, and what it must not hold."""

from __future__ import annotations

import io
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from baton.errors import ConfigError
from baton.logs import configure_logging, get_logger


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # Emptied first, so that configure_logging() does not close pytest's own handlers.
    root.handlers[:] = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "role.log"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_is_one_json_line(log_file: Path) -> None:
    configure_logging("prefill-0", file=log_file)
    get_logger("baton.test").info("worker_ready", name="decode-0", num_blocks=7)
    (line,) = lines(log_file)
    assert line.pop("time").endswith("Z")
    assert line == {
        "event": "worker_ready",
        "name": "decode-0",
        "num_blocks": 7,
        "role": "prefill-0",
        "level": "info",
        "logger": "baton.test",
    }


def test_the_standard_librarys_logs_take_the_same_way(log_file: Path) -> None:
    configure_logging("router", file=log_file)
    logging.getLogger("some.library").warning("slow %s", "peer", extra={"peer": "a:1"})
    (line,) = lines(log_file)
    assert (line["event"], line["logger"], line["level"]) == ("slow peer", "some.library", "warning")
    assert (line["role"], line["peer"]) == ("router", "a:1")


def test_structlogs_own_loggers_take_the_same_way(log_file: Path) -> None:
    configure_logging("router", file=log_file)
    structlog.get_logger("elsewhere").info("hello", a=1)
    (line,) = lines(log_file)
    assert (line["event"], line["role"], line["a"]) == ("hello", "router", 1)


def test_an_exception_stays_on_its_line(log_file: Path) -> None:
    configure_logging("router", file=log_file)
    try:
        raise ValueError("bad")
    except ValueError:
        get_logger("t").exception("step_failed")
    (line,) = lines(log_file)
    assert "ValueError: bad" in line["exception"]


def test_a_users_words_and_keys_are_withheld(log_file: Path) -> None:
    configure_logging("router", file=log_file)
    get_logger("t").info("request", prompt="geheim", api_key="geheim", num_tokens=3)
    logging.getLogger("t").info("request", extra={"token_ids": "geheim"})
    assert "geheim" not in log_file.read_text()
    assert lines(log_file)[0]["num_tokens"] == 3


def test_the_level_holds(log_file: Path) -> None:
    configure_logging("router", "warning", log_file)
    get_logger("t").info("quiet")
    get_logger("t").warning("loud")
    assert [line["event"] for line in lines(log_file)] == ["loud"]


def test_configuring_again_replaces(log_file: Path, tmp_path: Path) -> None:
    configure_logging("router", file=tmp_path / "first.log")
    configure_logging("router", file=log_file)
    get_logger("t").info("once")
    assert (tmp_path / "first.log").read_text() == ""
    assert len(lines(log_file)) == 1


def test_a_terminal_gets_text_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    configure_logging("router")
    get_logger("t").info("worker_ready", worker="decode-0")
    text = terminal.getvalue()
    assert "worker_ready" in text
    assert not text.startswith("{")


def test_logs_go_to_standard_error_and_never_to_standard_output() -> None:
    script = (
        "from baton.logs import configure_logging, get_logger\n"
        "get_logger('t').warning('before')\n"
        "configure_logging('router')\n"
        "get_logger('t').warning('after')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "before" in done.stderr
    assert json.loads(done.stderr.splitlines()[-1])["event"] == "after"


@pytest.mark.parametrize(
    ("level", "file", "field"),
    [("loud", None, "log_level"), ("info", "/no/such/folder/x.log", "log_file")],
)
def test_bad_settings_are_config_errors(level: str, file: str | None, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure_logging("router", level, file)
    assert caught.value.field == field


def test_a_log_file_is_its_owners(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        configure_logging("decode-0", "info", tmp_path / "decode-0.log")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "decode-0.log").stat().st_mode) == 0o600
