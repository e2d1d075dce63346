"""Compiles the calls of known models for GPUs that need not be there, and says what is wrong with them.

    python -m engine.kernels.audit [--target sm_90 ...] [--model Llama-3.1-8B ...] [--block-size 16 ...]
        [--kernel prefill_attention ...] [--brief] [--write docs/kernels.md]

The table is cases x declared configurations x devices; calls that the compiler would be given alike are one.
--brief takes, of kernels without matrix products, the first configuration only, and of caches those in HND
and in the weights' dtype. Needs no GPU. Must not run
under TRITON_INTERPRET=1, which leaves nothing to compile.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.kernels.cases import BLOCK_SIZES, LLAMA, MODELS, OTHER_STORAGES, PLAIN, Case, cases
from engine.kernels.devices import DEVICES, Device
from engine.kernels.kernel import Config
from engine.kernels.report import cost_table, replaced, resource_table
from engine.kernels.resources import Resources

NUM_PROCESSES = 2

# Kernels with matrix products, and what names the rows of their tiles.
_TILE_ROWS = {
    "embed_rms_norm_qkv": "BLOCK_T",
    "prefill_attention": "BLOCK_M",
    "paged_attention": "ROWS",
}
# Rows of a tile from which sm_90's wgmma and sm_100's tcgen05 can take it; smaller ones are left to mma.
_WIDE_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the table, not compiled yet."""

    case: Case
    config: Config
    device: Device

    def __str__(self) -> str:
        kernel = self.case.launch.kernel.name
        return f"{kernel} ({self.config}) of {self.case.model} with {self.case.problem} on {self.device.name}"

    @property
    def key(self) -> str:
        """Equal for entries that the compiler is given alike."""
        source, options = self.case.launch.source(self.device.target, self.config)
        return f"{source.hash()} {options}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which part of the table: names of models, devices and kernels, and block sizes.

    kernels: none for all.  is_brief: of kernels without matrix products, the first configuration only, and
        caches only in HND and in the weights' dtype.
    """

    models: tuple[str, ...] = tuple(model.name for model in MODELS)
    devices: tuple[str, ...] = tuple(device.name for device in DEVICES)
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    kernels: tuple[str, ...] = ()
    is_brief: bool = False


@functools.cache
def entries(selection: Selection) -> tuple[Entry, ...]:
    """The selected part of the table, each compilation once; the same in every process."""
    unique: dict[str, Entry] = {}
    for entry in _all_entries(selection):
        unique.setdefault(entry.key, entry)
    return tuple(unique.values())


def _all_entries(selection: Selection) -> Iterator[Entry]:
    models = tuple(model for model in MODELS if model.name in selection.models)
    yield from _entries_of(selection, cases(models, selection.block_sizes), is_brief=selection.is_brief)
    if not selection.is_brief:
        # Another storage changes how elements are converted, whatever the size of blocks.
        others = cases(models, selection.block_sizes[:1], OTHER_STORAGES)
        yield from _entries_of(selection, others, is_brief=True)


def _entries_of(selection: Selection, chosen: Iterable[Case], *, is_brief: bool) -> Iterator[Entry]:
    for case in chosen:
        kernel = case.launch.kernel
        if selection.kernels and kernel.name not in selection.kernels:
            continue
        configs = kernel.configs_for(case.launch.shape)
        for config in configs[:1] if is_brief and kernel.name not in _TILE_ROWS else configs:
            for device in DEVICES:
                if device.name in selection.devices:
                    yield Entry(case=case, config=config, device=device)


def audit(selection: Selection) -> Iterator[tuple[Entry, Resources]]:
    """Compiles the selected part of the table, in several processes."""
    chosen = entries(selection)
    # Forked, so that they have the entries, which no pipe carries.
    with multiprocessing.get_context("fork").Pool(NUM_PROCESSES) as pool:
        work = functools.partial(_compile, selection)
        yield from zip(chosen, pool.imap(work, range(len(chosen))), strict=True)


def _compile(selection: Selection, index: int) -> Resources:
    entry = entries(selection)[index]
    return Resources.of(entry.case.launch.compile(entry.device.target, entry.config))


def faults(entry: Entry, resources: Resources) -> list[str]:
    """What is wrong with a compiled kernel, in words."""
    return [*entry.device.faults(resources), *_instruction_faults(entry, resources)]


def _instruction_faults(entry: Entry, resources: Resources) -> list[str]:
    kernel = entry.case.launch.kernel.name
    if kernel not in _TILE_ROWS:
        return []
    if not resources.instruction:
        return ["multiplies without tensor cores"]
    constants = {**entry.case.launch.constants, **entry.config.constants}
    is_wide = constants[_TILE_ROWS[kernel]] >= _WIDE_ROWS
    if is_wide and resources.instruction != entry.device.instruction:
        return [f"multiplies by {resources.instruction}, not {entry.device.instruction}"]
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if something is wrong."""
    options = _options(arguments)
    selection = Selection(
        models=tuple(options.model),
        devices=tuple(options.target),
        block_sizes=tuple(options.block_size),
        kernels=tuple(options.kernel),
        is_brief=options.brief,
    )
    audited, num_faulty = [], 0
    for entry, resources in audit(selection):
        audited.append((entry, resources))
        wrong = faults(entry, resources)
        num_faulty += bool(wrong)
        sys.stdout.write(f"{'; '.join(wrong) or 'good'}: {entry}: {resources}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(audited)} compiled, {num_faulty} with faults\n")
    if options.write:
        _write(options.write, audited)
    return 1 if num_faulty else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.audit")
    whole = Selection()
    parser.add_argument("--target", nargs="+", choices=whole.devices, default=whole.devices)
    parser.add_argument("--model", nargs="+", choices=whole.models, default=whole.models)
    parser.add_argument("--block-size", nargs="+", type=int, default=whole.block_sizes)
    parser.add_argument("--kernel", nargs="+", default=whole.kernels)
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--write", type=Path)
    return parser.parse_args(arguments)


def _write(path: Path, audited: Iterable[tuple[Entry, Resources]]) -> None:
    lines = [
        (entry.case.launch.kernel.name, str(entry.config), entry.device, resources)
        for entry, resources in audited
        if entry.case.model == LLAMA.name and entry.case.storage == PLAIN
    ]
    document = replaced(path.read_text("utf-8"), "resources", resource_table(lines))
    path.write_text(replaced(document, "costs", cost_table()), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
