"""`baton models`: the models that have been pulled, and what of each fits into memory."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from baton.cache import cache_dir
from baton.catalogue import CATALOGUE
from baton.cli.options import AsJson
from baton.cli.whole_table import print_whole
from baton.host_memory import available_host_bytes
from baton.model_shelf import ShelfModel, pulled_models

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def models(
    *,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of one worker, as in 80GiB.", show_default="what this machine has available"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the models that have been pulled, and what of each fits into memory.

    "fits" counts the tokens of KV that have room beside the weights of one worker; a model fits if that is a
    sequence of full length. Each worker of a cluster has weights and KV of its own.
    """
    memory_bytes = available_host_bytes() if memory is None else parse_size(memory)
    found = list(pulled_models())
    if as_json:
        shown = [_as_dict(model, memory_bytes) for model in found]
        typer.echo(json.dumps({"memory_bytes": memory_bytes, "models": shown}))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    usable = [model for model in found if not model.problem]
    if usable:
        print_whole(console, models_table(usable, memory_bytes))
    for model in found:
        if model.problem:
            console.print(f"note: {model.name} cannot be used: {model.problem}")
    missing = sorted(CATALOGUE.keys() - {model.name for model in found})
    notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if not found:
        notes.print(f"no model in {cache_dir() / 'models'}")
    if missing:
        notes.print(f"`baton pull` knows besides: {', '.join(missing)}; and any org/model of the hub")


def models_table(found: list[ShelfModel], memory_bytes: int | None) -> Table:
    """One row per model."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for title in ("model", "architecture", "dtype"):
        table.add_column(title, no_wrap=True)
    for title in ("weights", "context", "KV/token", "fits"):
        table.add_column(title, justify="right", no_wrap=True)
    for model in found:
        table.add_row(
            model.name,
            model.architecture,
            model.dtype,
            shown_size(model.weights_bytes),
            f"{model.max_model_len:,}",
            shown_size(model.kv_bytes_per_token),
            _fits(model, memory_bytes),
        )
    return table


def parse_size(text: str) -> int:
    """Bytes of "80GiB", "24 GB" or "1000"; raises typer.BadParameter."""
    found = _SIZE.fullmatch(text.strip())
    unit = "" if found is None else (found[2] or "").lower().removesuffix("b")
    units = _UNITS | _BINARY_UNITS
    if found is None or unit not in units:
        raise typer.BadParameter(f"{text!r} is no size; write 80GiB, 24GB or bytes", param_hint="'--memory'")
    return int(float(found[1]) * units[unit])


def shown_size(num_bytes: int) -> str:
    """ "269 MiB"; one decimal where the number is small."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"


def _fits(model: ShelfModel, memory_bytes: int | None) -> str:
    if memory_bytes is None:
        return "?"
    tokens = model.kv_tokens_in(memory_bytes)
    if not tokens:
        return "no"
    return f"{tokens:,} tokens" + ("" if model.fits_in(memory_bytes) else ", less than its context")


def _as_dict(model: ShelfModel, memory_bytes: int | None) -> dict[str, Any]:
    fits = None if memory_bytes is None else model.fits_in(memory_bytes)
    tokens = None if memory_bytes is None else model.kv_tokens_in(memory_bytes)
    return {**asdict(model), "path": str(model.path), "fits": fits, "kv_tokens": tokens}
