"""KV from a prefill process to a decode process on one GPU: a section of `benchmarks.gpu`.

Owns what is measured and what is checked. KV goes the way it goes between workers: from kernels into cache
and stage, through the sender's reader, in frames with digests, into leased blocks of another cache; only the
transport is a socket of this benchmark's. Both processes compute and copy on one GPU, in turns: what a prompt
and its transfer cost each other is more than it is between two.

    equality   a small model in float32: the decode process goes on exactly as if it had computed the prompt
    speed      a model of Llama-3.1-8B's sizes
    deaths     of one process in mid-transfer: the other gives everything back, and a new one takes its place
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.on_gpu.section import Budget, GpuRow
from benchmarks.on_gpu.transfer_child import ChildError
from benchmarks.on_gpu.transfer_pair import Load, Moved, Pair, Prompt

# Of values of about 1 in float32, computed twice.
_KV_TOLERANCE = 1e-4
_FAILURES = (ChildError, TimeoutError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one device is asked.

    exact, fast: for equality and deaths, and for speed.
    exact_prompts: tokens of each.  fast_prompts: tokens, and most bytes of a frame, of each.
    num_new: tokens behind each.
    num_warm: runs of each prompt that do not count.  num_runs: those that do, of each kind, for a median.
    held_after: frames of a transfer after which a process dies.
    seconds: that a part takes, and half of that one prompt of the speed.
    """

    exact: Load
    exact_prompts: tuple[int, ...]
    fast: Load
    fast_prompts: tuple[tuple[int, int], ...]
    num_new: int
    num_warm: int
    num_runs: int
    held_after: int
    seconds: float


GPU = Plan(
    exact=Load(size="exact", num_tokens=8192, chunk_tokens=512, frame_bytes=1 << 20, stall_s=5.0),
    exact_prompts=(500, 1999),
    fast=Load(size="llama-8b", num_tokens=16_384, chunk_tokens=2048, frame_bytes=4 << 20, stall_s=5.0),
    fast_prompts=((512, 1 << 20), (2048, 1 << 20), (8192, 1 << 20), (8192, 4 << 20)),
    num_new=16,
    num_warm=1,
    num_runs=3,
    held_after=4,
    seconds=20.0,
)

# Where an interpreter computes beside a hundred other tests, a step may take seconds.
_TINY = Load(size="interpreted", num_tokens=64, chunk_tokens=12, frame_bytes=2048, stall_s=30.0)
CPU = Plan(
    exact=_TINY,
    exact_prompts=(9, 21),
    fast=_TINY,
    fast_prompts=((21, 2048),),
    num_new=2,
    num_warm=0,
    num_runs=1,
    held_after=1,
    seconds=5.0,
)

Part = Callable[[Pair, Plan], Iterator[GpuRow]]


def run(device: torch.device, budget: Budget, _rows: Sequence[GpuRow] = ()) -> Iterator[GpuRow]:
    """The rows of all parts. What goes wrong in one costs that part; the next gets new processes."""
    plan = GPU if device.type == "cuda" else CPU
    pair: Pair | None = None
    with tempfile.TemporaryDirectory(prefix="baton-kv-") as folder:
        try:
            for number, (name, share, load, part) in enumerate(_PARTS):
                if not budget.has(share * plan.seconds):
                    yield GpuRow.not_run(name)
                    continue
                try:
                    if pair is None:
                        pair = Pair(device, Path(folder) / str(number), load(plan), budget)
                    else:
                        pair.load(load(plan))
                    yield from part(pair, plan)
                except _FAILURES as error:
                    yield GpuRow.failed(name, error) if budget.left else GpuRow.not_run(name)
                    if pair is not None:
                        pair.close()
                    pair = None
        finally:
            if pair is not None:
                pair.close()


def _equality(pair: Pair, plan: Plan) -> Iterator[GpuRow]:
    digest = pair.ask(pair.decode, "digest")
    yield GpuRow(metric=f"KV frames, digest: {digest}", unit="bits", ours=64.0, runs=1)
    prompts = [_exact_prompt(plan, length) for length in plan.exact_prompts]
    faults = [fault for prompt in prompts for fault in _move_faults(pair, prompt)]
    yield GpuRow.check("KV transfer, same tokens", faults, passed=len(prompts) - len(faults))


def _exact_prompt(plan: Plan, num_tokens: int) -> Prompt:
    return Prompt(
        seed=num_tokens, num_tokens=num_tokens, num_new=plan.num_new, frame_bytes=plan.exact.frame_bytes
    )


def _move_faults(pair: Pair, prompt: Prompt) -> list[str]:
    """What is wrong with a prompt that goes over; one word of it at most."""
    before = _ledgers(pair)
    moved = pair.move(prompt, keeps_kv=True)
    expected, kv_error = pair.alone(prompt)
    if kv_error > _KV_TOLERANCE:
        return [f"{prompt.num_tokens} tokens: KV is off by {kv_error:.3g}"]
    if moved.tokens != expected:
        return [f"{prompt.num_tokens} tokens: {moved.tokens} and not {expected}"]
    if moved.num_bytes != sum(num_bytes for _, num_bytes in moved.arrivals):
        return [f"{prompt.num_tokens} tokens: {moved.num_bytes} bytes were sent, others arrived"]
    if _ledgers(pair) != before:
        return [f"{prompt.num_tokens} tokens: {before} became {_ledgers(pair)}"]
    return []


def _ledgers(pair: Pair) -> dict[str, dict[str, int]]:
    return {child.role: pair.ask(child, "ledger") for child in (pair.prefill, pair.decode)}


def _speed(pair: Pair, plan: Plan) -> Iterator[GpuRow]:
    for length, frame_bytes in plan.fast_prompts:
        name = f"KV {length}, {frame_bytes >> 10} KiB frames"
        if not pair.has(plan.seconds / 2):
            yield GpuRow.not_run(name)
            continue
        prompt = Prompt(seed=length, num_tokens=length, num_new=plan.num_new, frame_bytes=frame_bytes)
        meanwhile = [pair.move(prompt) for _ in range(plan.num_warm + plan.num_runs)][plan.num_warm :]
        alone_s = [pair.compute(prompt) for _ in range(plan.num_runs)]
        after = [pair.move(prompt, "after") for _ in range(plan.num_runs)]
        for row in _speed_rows(name, alone_s, after, meanwhile):
            yield replace(row, in_table=(length, frame_bytes) == max(plan.fast_prompts))
        expected, _ = pair.alone(prompt)
        equal = sum(one == other for one, other in zip(meanwhile[0].tokens, expected, strict=True))
        yield GpuRow(
            metric=f"{name}: tokens as computed alone",
            unit="share",
            ours=equal / len(expected),
            runs=len(expected),
        )


def _speed_rows(
    name: str, alone_s: list[float], after: list[Moved], meanwhile: list[Moved]
) -> Iterator[GpuRow]:
    yield _rate_row(f"{name}: computed before", after)
    row = _rate_row(f"{name}: meanwhile", meanwhile)
    hidden = {"hidden": median(_hidden_share(moved) for moved in meanwhile)}
    yield replace(row, also={**hidden, **row.also})
    ours, alone = median(moved.compute_s for moved in meanwhile), median(alone_s)
    yield GpuRow(
        metric=f"{name}: prefill",
        unit="ms",
        ours=ours * 1e3,
        runs=len(meanwhile),
        peer=alone * 1e3,
        peer_name="nothing sent",
        ratio=alone / ours,
        also={
            "min ms": min(moved.compute_s for moved in meanwhile) * 1e3,
            "max ms": max(moved.compute_s for moved in meanwhile) * 1e3,
        },
    )


def _rate_row(metric: str, runs: list[Moved]) -> GpuRow:
    """Of a transfer from its first frame to the answer."""
    rates = [moved.num_bytes / moved.duration_s / 1e9 for moved in runs]
    return GpuRow(
        metric=metric,
        unit="GB/s",
        ours=median(rates),
        runs=len(runs),
        also={
            "MB": runs[-1].num_bytes / 1e6,
            "min GB/s": min(rates),
            "max GB/s": max(rates),
            "ms per decode step": median(_step_s(moved) for moved in runs) * 1e3,
            **{name.replace("_", " "): float(count) for name, count in sorted(runs[-1].counters.items())},
        },
    )


def _step_s(moved: Moved) -> float:
    return moved.decode_s / max(1, len(moved.tokens) - 1)


def _hidden_share(moved: Moved) -> float:
    """Of the bytes, what was stored at the receiver when the prompt's last layer was computed."""
    hidden = sum(num_bytes for at, num_bytes in moved.arrivals if at <= moved.computed_at)
    return hidden / moved.num_bytes


def _prefill_killed(pair: Pair, plan: Plan) -> Iterator[GpuRow]:
    prompt = _exact_prompt(plan, min(plan.exact_prompts))
    before = pair.ask(pair.decode, "ledger")
    attempt = pair.begin(prompt, "meanwhile", hold_after=plan.held_after)
    num_frames = pair.ask(pair.decode, "arrived", attempt=attempt, num_frames=plan.held_after)
    killed_at = pair.prefill.kill()
    noticed_at = pair.ask(pair.decode, "lost", attempt=attempt)["at"]
    ledger = pair.ask(pair.decode, "ledger")
    faults = [] if ledger == before else [f"{before} became {ledger}"]
    if noticed_at is None:
        faults.append("the transfer was committed all the same")
    pair.renew_prefill()
    faults += _move_faults(pair, prompt)
    yield GpuRow.check(
        "KV transfer, prefill process killed",
        faults,
        passed=int(not faults),
        also={"frames stored": num_frames, "ms to notice": ((noticed_at or killed_at) - killed_at) * 1e3},
    )


def _decode_killed(pair: Pair, plan: Plan) -> Iterator[GpuRow]:
    prompt = _exact_prompt(plan, min(plan.exact_prompts))
    before = pair.ask(pair.prefill, "ledger")
    attempt = pair.begin(prompt, "meanwhile", hold_after=plan.held_after)
    pair.ask(pair.decode, "arrived", attempt=attempt, num_frames=plan.held_after)
    killed_at = pair.decode.kill()
    faults = []
    noticed_at = killed_at
    try:
        pair.prefill.hear(pair.seconds(2 * plan.exact.stall_s))
        faults.append("the transfer was committed all the same")
    except ChildError as error:
        noticed_at = error.at
        if error.kind != "PeerLost" or error.at - killed_at > plan.exact.stall_s:
            faults.append(f"{error} after {error.at - killed_at:.3g} s")
    ledger = pair.ask(pair.prefill, "ledger")
    if ledger != before:
        faults.append(f"{before} became {ledger}")
    yield GpuRow.check(
        "KV transfer, decode process killed",
        faults,
        passed=int(not faults),
        also={"ms to notice": (noticed_at - killed_at) * 1e3},
    )


# What each is called, how much of a part's time it takes, and for which model.
_PARTS: tuple[tuple[str, float, Callable[[Plan], Load], Part], ...] = (
    ("KV transfer, equality", 1.0, lambda plan: plan.exact, _equality),
    ("KV transfer, prefill process killed", 1.0, lambda plan: plan.exact, _prefill_killed),
    ("KV transfer, speed", 1.0, lambda plan: plan.fast, _speed),
    # The last one: it leaves no process to receive anything.
    ("KV transfer, decode process killed", 0.25, lambda plan: plan.exact, _decode_killed),
)
