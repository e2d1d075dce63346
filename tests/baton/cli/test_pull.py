from __future__ import annotations

import io

import pytest
from rich.console import Console

from baton.cli.pull import PullProgress


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("baton.cli.pull.time", clock)
    return clock


def test_plain_lines_come_with_each_step_and_then_every_two_seconds(clock):
    text = io.StringIO()
    with PullProgress(Console(file=text, force_terminal=False)) as progress:
        progress.show("download", 0, 0)
        for second in range(1, 6):
            clock.now_s = 100.0 + second
            progress.show("download", second * 10, 100)
        progress.show("verify", 0, 0)
    assert text.getvalue().splitlines() == [
        "downloading",
        "downloading 20 %",
        "downloading 40 %",
        "verifying",
    ]


def test_an_unknown_total_counts_megabytes(clock):
    text = io.StringIO()
    with PullProgress(Console(file=text, force_terminal=False)) as progress:
        progress.show("download", 0, 0)
        clock.now_s += 2
        progress.show("download", 3_000_000, 0)
    assert text.getvalue().splitlines() == ["downloading", "downloading 3 MB"]


def test_a_terminal_shows_every_step():
    text = io.StringIO()
    with PullProgress(Console(file=text, force_terminal=True, width=100)) as progress:
        for step in ("download", "verify", "unpack", "convert", "hash"):
            progress.show(step, 1, 2)
    for words in ("downloading", "verifying", "unpacking", "converting", "identifying"):
        assert words in text.getvalue()
