"""docs/kernels.md's tables, as Markdown: what compiled kernels hold, and the least time that they can take.

Written between markers, so that the prose around them is left alone. Compiles nothing, opens no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.kernels.cases import LLAMA
from engine.kernels.cost import GPUS, Cost, step_costs
from engine.kernels.devices import DEVICES, Device
from engine.kernels.model_launches import Step
from engine.kernels.resources import Resources

COST_STEPS = (
    *(Step(num_sequences=1, new_tokens=length, context=length) for length in (256, 1024, 2048)),
    *(Step(num_sequences=size, new_tokens=1, context=1024) for size in (1, 32, 128)),
)
# Of kernel, configuration, device.
Line = tuple[str, str, Device, Resources]


def resource_table(lines: Iterable[Line]) -> str:
    """A row per kernel and configuration; of several calls, the one with the most registers, then memory."""
    worst: dict[tuple[str, str], dict[str, Resources]] = {}
    for kernel, config, device, resources in lines:
        cells = worst.setdefault((kernel, config), {})
        known = cells.get(device.name)
        if known is None or _held(known) < _held(resources):
            cells[device.name] = resources
    kernels = dict.fromkeys(kernel for kernel, _ in worst)
    rows = (
        [kernel, config, *(_cell(device, cells.get(device.name)) for device in DEVICES)]
        for kernel in kernels
        for (of_kernel, config), cells in worst.items()
        if of_kernel == kernel
    )
    return _table(["kernel", "configuration", *(device.name for device in DEVICES)], rows)


def _held(resources: Resources) -> tuple[int, int]:
    return resources.registers, resources.shared_bytes


def _cell(device: Device, resources: Resources | None) -> str:
    if resources is None:
        return "-"
    parts = [
        f"{resources.registers} r",
        f"{resources.shared_bytes / 1024:.1f} KiB",
        f"{device.occupancy(resources):.0%}",
        resources.instruction,
    ]
    return " ".join(part for part in parts if part)


def cost_table() -> str:
    """A row per kernel and step of Llama 3.1 8B: bytes, operations, and each GPU's least microseconds."""
    head = ["kernel", "step", "MB", "GFLOP", *(f"{gpu.name} us" for gpu in GPUS)]
    return _table(head, _cost_rows())


def _cost_rows() -> Iterator[list[str]]:
    costs = [(step, step_costs(LLAMA.config, step, LLAMA.dtype.itemsize)) for step in COST_STEPS]
    kernels = dict.fromkeys(kernel for _, by_kernel in costs for kernel in by_kernel)
    for kernel in kernels:
        for step, by_kernel in costs:
            if kernel in by_kernel:
                yield [kernel, _step(step), *_numbers(by_kernel[kernel])]


def _step(step: Step) -> str:
    if step.new_tokens == 1:
        return f"decode, {step.num_sequences} at {step.context}"
    return f"prefill, {step.new_tokens}"


def _numbers(cost: Cost) -> list[str]:
    numbers = [(cost.read + cost.written) / 1e6, cost.flops / 1e9, *(1e6 * cost.seconds(gpu) for gpu in GPUS)]
    return [f"{number:.0f}" if number >= 100 else f"{number:.2g}" for number in numbers]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def replaced(document: str, name: str, content: str) -> str:
    """The document with what lies between `<!-- name -->` and `<!-- end of name -->` replaced.

    Raises ValueError if it has no such markers.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the document has no markers {begin.strip()} and {end}")
    return f"{before}{begin}{content}{end}{after}"
