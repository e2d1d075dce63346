"""Tables that a narrow terminal wraps, but does not cut."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table


def print_whole(console: Console, table: Table) -> None:
    """Prints an empty line and the table, at its own width."""
    unlimited = console.options.update(width=sys.maxsize)
    console.width = max(console.width, console.measure(table, options=unlimited).maximum)
    console.print()
    console.print(table)
