"""`baton config show`: the settings of a role, merged, and where each one comes from."""

from __future__ import annotations

import json
import os
from importlib import import_module
from typing import Annotated, Any, Literal, get_args

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from baton.cli.options import AsJson, ConfigFile
from baton.cli.whole_table import print_whole
from baton.config import Origin, explain_config

Section = Literal["cluster", "router", "prefill", "decode", "pool"]
# Of the roles, by name: what they import is not for every install, and baton knows nothing of them.
_CLASSES: dict[Section, tuple[str, str]] = {
    "cluster": ("baton.cluster.config", "ClusterConfig"),
    "router": ("router.config", "RouterConfig"),
    "prefill": ("prefill_worker.config", "PrefillConfig"),
    "decode": ("decode_worker.config", "DecodeConfig"),
    "pool": ("baton.pool.config", "PoolConfig"),
}
_HIDDEN = "(hidden)"

config = typer.Typer(help="Show settings and where each one comes from.")


@config.callback()
def group() -> None:
    """Show settings and where each one comes from."""


@config.command()
def show(
    *,
    section: Annotated[
        Section | None, typer.Argument(help="Whose settings.", show_default="everybody's")
    ] = None,
    flags: Annotated[
        list[str] | None, typer.Argument(help="Flags of the role, after --, as in: router -- --port 50061")
    ] = None,
    config_file: ConfigFile = None,
    changed: Annotated[bool, typer.Option("--changed", help="Leave out what is at its default.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the settings that a role would run with here, and where each one comes from.

    Flags go before BATON_<SECTION>_* variables, those before the file, and the file before defaults. Secrets
    are hidden. Exit code 2: a setting is unknown, or has a value that it cannot have.
    """
    argv = [*([f"--config={config_file}"] if config_file else []), *(flags or [])]
    found = _everybody(argv) if section is None else {section: _explained(section, argv)}
    shown = {
        name: [origin for origin in origins if not changed or origin.source not in ("default", "missing")]
        for name, origins in found.items()
    }
    if as_json:
        typer.echo(json.dumps({name: _as_dict(origins) for name, origins in shown.items()}))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for name, origins in shown.items():
        if origins:
            print_whole(console, settings_table(name, origins))


def _everybody(argv: list[str]) -> dict[Section, list[Origin]]:
    """All sections but those whose modules this install cannot load, which is said."""
    found: dict[Section, list[Origin]] = {}
    for name in get_args(Section):
        try:
            found[name] = _explained(name, argv)
        except ModuleNotFoundError as error:
            typer.echo(
                f"note: [{name}] is left out; it needs {error.name}, a part of baton-serve[all]", err=True
            )
    return found


def _explained(section: Section, argv: list[str]) -> list[Origin]:
    module, name = _CLASSES[section]
    cls = getattr(import_module(module), name)
    return explain_config(cls, section=section, argv=argv, environ=os.environ)


def settings_table(section: str, origins: list[Origin]) -> Table:
    """One row per setting."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for title in (f"[{section}]", "value", "from"):
        table.add_column(title, no_wrap=True)
    for origin in origins:
        table.add_row(origin.name, _written(origin), _described(origin))
    return table


def _written(origin: Origin) -> str:
    if _is_hidden(origin):
        return _HIDDEN
    value = origin.value
    if value is None:
        return "unset" if origin.source != "missing" else ""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def _described(origin: Origin) -> str:
    if origin.source == "missing":
        return "missing; it must be set"
    return f"{origin.source} {origin.where}".strip()


def _is_hidden(origin: Origin) -> bool:
    """A default is in the source for all to see, and an empty text says that there is no secret."""
    return origin.is_secret and origin.source != "default" and bool(origin.value)


def _as_dict(origins: list[Origin]) -> dict[str, dict[str, Any]]:
    """By setting; a hidden value is null."""
    return {
        origin.name: {
            "value": None if _is_hidden(origin) else origin.value,
            "source": origin.source,
            "where": origin.where,
            "hidden": _is_hidden(origin),
        }
        for origin in origins
    }
