"""Several answers at once: live side by side on a terminal, whole and one after the other elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text


class DemoStreams:
    """The answers so far, by index."""

    def __init__(self, labels: Sequence[str], console: Console) -> None:
        self._labels = labels
        self._texts = ["" for _ in labels]
        self._console = console
        self._live = Live(self._panels(), console=console) if console.is_terminal else None

    def add(self, index: int, text: str) -> None:
        """Some more text of one answer."""
        self._texts[index] += text
        if self._live is not None:
            self._live.update(self._panels())

    def finish(self, index: int) -> None:
        """The answer is complete."""
        if self._live is None:
            self._console.print(f"[{self._labels[index]}]", markup=False)
            self._console.print(self._texts[index].strip(), markup=False, soft_wrap=True)
            self._console.print()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _panels(self) -> Group:
        # Text, not str: an answer may hold square brackets, which rich would read as markup.
        return Group(
            *(
                Panel(Text(text.strip()), title=label, title_align="left")
                for label, text in zip(self._labels, self._texts, strict=True)
            )
        )
