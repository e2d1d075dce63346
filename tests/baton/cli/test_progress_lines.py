from __future__ import annotations

import asyncio
import io

from rich.console import Console

from baton.cli import progress_lines
from baton.cli.progress_lines import ProgressLines


async def test_plain_lines_repeat_while_nothing_changes(monkeypatch) -> None:
    monkeypatch.setattr(progress_lines, "LINE_INTERVAL_S", 0.01)
    text = io.StringIO()
    async with ProgressLines(Console(file=text, force_terminal=False)) as progress:
        progress.show("waiting for [prefill-0]")
        async with asyncio.timeout(5):
            while text.getvalue().count("\n") < 3:
                await asyncio.sleep(0.005)
    lines = text.getvalue().splitlines()
    assert set(lines) == {"waiting for [prefill-0] (0 s)"}
    after = len(text.getvalue())
    await asyncio.sleep(0.03)
    assert len(text.getvalue()) == after


async def test_a_terminal_shows_the_line_with_a_spinner() -> None:
    text = io.StringIO()
    async with ProgressLines(Console(file=text, force_terminal=True, width=80)) as progress:
        progress.show("waiting for prefill-0")
    assert "waiting for prefill-0 (0 s)" in text.getvalue()


async def test_a_new_line_is_said_at_once_and_again_only_after_the_whole_interval(monkeypatch) -> None:
    monkeypatch.setattr(progress_lines, "LINE_INTERVAL_S", 3600.0)
    text = io.StringIO()
    async with ProgressLines(Console(file=text, force_terminal=False)) as progress:
        # The first look of the ticking task finds nothing to say, and is the start of an interval.
        await asyncio.sleep(0)
        for name in ("prefill-0", "decode-0"):
            progress.show(f"waiting for {name}")
            await asyncio.sleep(0.01)
    assert text.getvalue().splitlines() == ["waiting for prefill-0 (0 s)", "waiting for decode-0 (0 s)"]
