"""Which commands there are: the table from which `baton --help` is made without loading any of them.

A command lives in the module of its name, as a function of its name, or as a typer app if it has commands of
its own. Each module may import what it likes at its top: it is loaded when its command is run, or its help
shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from inspect import cleandoc
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}

_ASK = "Ask a cluster"
_RUN = "Run a cluster"
_HERE = "This machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One command. help: a line for the list. panel: the heading under which it stands there."""

    name: str
    panel: str
    help: str

    def load(self) -> Any:
        """The command itself, whose module is imported now."""
        home = import_module(f"baton.cli.{self.name}")
        found = getattr(home, self.name)
        if isinstance(found, typer.Typer):
            return get_command(found)
        alone = typer.Typer(
            context_settings=HELP_OPTIONS, add_completion=False, pretty_exceptions_enable=False
        )
        alone.command(self.name, help=unwrapped(found.__doc__ or ""))(found)
        return get_command(alone)


COMMANDS = (
    Entry(name="chat", panel=_ASK, help="Talk to the model."),
    Entry(name="generate", panel=_ASK, help="Continue a text."),
    Entry(name="bench", panel=_ASK, help="Measure a running cluster under load."),
    Entry(name="ready", panel=_ASK, help="Say whether a router takes requests; wait for it."),
    Entry(name="up", panel=_RUN, help="Start a cluster on this machine."),
    Entry(name="demo", panel=_RUN, help="Show the whole path, from pulling a model to answers."),
    Entry(name="status", panel=_RUN, help="Show workers, length buckets and queues."),
    Entry(name="workers", panel=_RUN, help="Show which workers there are and who runs them."),
    Entry(name="explain", panel=_RUN, help="Show where a request's time went."),
    Entry(name="scale", panel=_RUN, help="Add workers, or drain and remove some."),
    Entry(name="drain", panel=_RUN, help="Let one worker end what it has, then remove it."),
    Entry(name="tenants", panel=_RUN, help="Tell callers apart by their API keys."),
    Entry(name="plan", panel=_HERE, help="Say how many workers a load needs."),
    Entry(name="pull", panel=_HERE, help="Fetch a model."),
    Entry(name="models", panel=_HERE, help="List the models that have been pulled, and what fits."),
    Entry(name="config", panel=_HERE, help="Show settings and where each one comes from."),
    Entry(name="doctor", panel=_HERE, help="Look for what keeps Baton from working well."),
)


def unwrapped(docstring: str) -> str:
    """A docstring with each paragraph on a line of its own: the terminal says where lines end."""
    return "\n\n".join(" ".join(part.split()) for part in cleandoc(docstring).split("\n\n"))


class LazyCommand(TyperCommand):
    """Stands for a command in lists; becomes it when it is given arguments."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(entry.name, help=entry.help, rich_help_panel=entry.panel)
        self._entry = entry

    def make_context(self, *given: Any, **extra: Any) -> Any:
        """The context of the command itself."""
        return self._entry.load().make_context(*given, **extra)


class Commands(TyperGroup):
    """All commands, in the order of the table."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        del ctx
        return [entry.name for entry in COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What stands for one of them."""
        del ctx
        return next((LazyCommand(entry) for entry in COMMANDS if entry.name == cmd_name), None)
