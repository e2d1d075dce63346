"""The reference part of docs/cli.md: writes it from the commands themselves, or says whether it is fresh.

python -m checks.cli_docs --write     writes it
python -m checks.cli_docs             compares without writing; 1 if something differs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.cli.commands import COMMANDS
from baton.cli.exit_codes import EXIT_CODES

PATH = Path("docs/cli.md")
BEGIN = "<!-- reference: written by python -m checks.cli_docs --write -->"
END = "<!-- end of the reference -->"


def rendered() -> str:
    """The reference: the exit codes, then every command with its options."""
    lines = ["", "## Exit codes", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    lines += ["", "## Commands", ""]
    for entry in COMMANDS:
        lines += _command(entry.load(), f"baton {entry.name}")
    return "\n".join(lines)


def fresh(text: str) -> str:
    """The document with its reference as it should be; raises ValueError if the markers are not there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PATH} lacks the markers of its reference: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{rendered()}{END}{after}"


def main(argv: list[str] | None = None) -> int:
    """Writes, or compares; 1 if the file is not fresh."""
    parser = argparse.ArgumentParser(prog="checks.cli_docs")
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args(argv).write
    text = PATH.read_text(encoding="utf-8")
    wanted = fresh(text)
    if write:
        PATH.write_text(wanted, encoding="utf-8")
    elif text != wanted:
        print(f"{PATH} is not what the commands say; run python -m checks.cli_docs --write")
        return 1
    print(f"cli docs: {len(COMMANDS)} commands")
    return 0


def _command(command: Any, name: str) -> Iterator[str]:
    """A command, or the commands of a group."""
    children = getattr(command, "commands", {})
    if children:
        for child in children.values():
            yield from _command(child, f"{name} {child.name}")
        return
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    yield from (f"### `{name}`", "", "```", " ".join([name, "[OPTIONS]", *map(_usage, arguments)]), "```", "")
    for paragraph in (command.help or "").split("\n\n"):
        yield from (" ".join(paragraph.split()).replace("<", "\\<"), "")
    if arguments or options:
        yield from ("| option | meaning | default |", "|---|---|---|")
    for param in (*arguments, *options):
        yield f"| {_names(param)} | {_cell(param.help or '')}{_variable(param)} | {_default(param)} |"
    yield ""


def _usage(argument: Any) -> str:
    name = (argument.metavar or argument.name).strip("[]").upper()
    name += "..." if argument.nargs == -1 else ""
    return name if argument.required else f"[{name}]"


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{_usage(param).strip('[]')}`"
    return ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))


def _variable(param: Any) -> str:
    return f" (`{param.envvar}`)" if param.envvar else ""


def _default(param: Any) -> str:
    if isinstance(param.show_default, str):
        return _cell(param.show_default)
    if param.required:
        return "required"
    default = param.default
    return "" if default in (None, False, ()) and not _is_number(default) else f"`{_cell(str(default))}`"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    sys.exit(main())
