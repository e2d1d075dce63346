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
