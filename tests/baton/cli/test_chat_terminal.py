"""`baton chat` at a terminal of its own: what is typed, and what is on the screen."""

from __future__ import annotations

import os
import re
import select
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pty = pytest.importorskip("pty")

# Makes the terminal its own, so that Ctrl-C reaches it.
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
WITHIN_S = 20.0


class Terminal:
    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, sys.executable, "-m", "baton.cli.main", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80", **environment},
        )
        os.close(slave)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> str:
        """Everything since the last call, once `text` is part of it."""
        deadline = time.monotonic() + WITHIN_S
        while text not in self.screen and time.monotonic() < deadline:
            if select.select([self._master], [], [], 0.1)[0]:
                self.screen += os.read(self._master, 4096).decode()
        assert text in self.screen, self.screen
        before, _, self.screen = self.screen.partition(text)
        return before + text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(router, tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(
        ["chat", "--address", router.address], {"BATON_CACHE_DIR": str(tmp_path), "NO_COLOR": "1"}
    )
    yield found
    found.close()


def test_a_conversation(terminal, router, tmp_path) -> None:
    terminal.wait_for("> ")
    terminal.type("One\n")
    terminal.wait_for("Paris is it.")
    terminal.wait_for("> ")
    # The arrow brings the last line back.
    terminal.type("\x1b[A Two\n")
    terminal.wait_for("Paris is it.")
    terminal.wait_for("> ")
    router.hold = threading.Event()
    terminal.type("Three\n")
    terminal.wait_for("Paris is it.")
    terminal.type("\x03")
    terminal.wait_for("cancelled")
    router.hold.set()
    shown = terminal.wait_for("> ")
    # No colors, and nothing that Python says of itself.
    assert "Warning" not in shown
    assert not re.search(r"\x1b\[[0-9;]*m", shown)
    terminal.type("/exit\n")
    assert terminal.process.wait(WITHIN_S) == 0

    assert [request.chat.messages[-1].content for request in router.requests] == ["One", "One Two", "Three"]
    history = tmp_path / "chat_history"
    assert history.read_text().splitlines()[:2] == ["One", "One Two"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
