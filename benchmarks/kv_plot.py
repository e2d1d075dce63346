"""The picture of a run: GB/s over prompt length with the bare peers as lines, hidden share over chunk size.

Owns the drawing only. matplotlib is installed for development and imported nowhere else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.kv_hidden import HIDDEN_TARGET, Hidden
from benchmarks.kv_throughput import GRPC, MEMCPY, NIXL, TCP, BarePeers, Throughput

COLORS = {"grpc": "tab:blue", "shm": "tab:green", "nixl": "tab:orange"}
BARE_COLORS = {GRPC: "tab:blue", MEMCPY: "tab:green", NIXL: "tab:orange", TCP: "tab:gray"}
# The block size that the engine chooses for this model.
BLOCK = "block 64"


def draw(throughputs: Sequence[Throughput], peers: BarePeers, hidden: Sequence[Hidden], path: Path) -> Path:
    """Writes the SVG file and returns its path."""
    mpl.use("svg")
    # The same figures make the same file, but for the date.
    mpl.rcParams["svg.hashsalt"] = "baton"
    from matplotlib import pyplot  # noqa: PLC0415 - after the backend is chosen

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    _draw_throughput(left, throughputs, peers)
    _draw_hidden(right, hidden)
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _draw_throughput(axes: Any, throughputs: Sequence[Throughput], peers: BarePeers) -> None:
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for result in throughputs:
        if result.group.name == BLOCK and result.gb_s is not None:
            points[result.lane.name].append((result.num_tokens, result.gb_s))
    for name, line in points.items():
        style = "--" if "no digests" in name else "-"
        color = COLORS[name.partition(",")[0]]
        axes.plot(*zip(*line, strict=True), f"o{style}", color=color, label=name)
    for row in peers.rows():
        if row.ours is not None and row.metric in BARE_COLORS:
            axes.axhline(row.ours, color=BARE_COLORS[row.metric], linestyle=":", label=row.metric)
    axes.set(xscale="log", xlabel="prompt, tokens", ylabel="GB/s", title=f"Transfer, SmolLM2-135M, {BLOCK}")
    ticks = sorted({result.num_tokens for result in throughputs})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    if ticks:
        axes.legend(fontsize="x-small")


def _draw_hidden(axes: Any, hidden: Sequence[Hidden]) -> None:
    points: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for result in hidden:
        if result.share is not None:
            points[result.transport, result.num_tokens].append((result.chunk_tokens, result.share))
    longest = max((num_tokens for _, num_tokens in points), default=0)
    for (transport, num_tokens), line in points.items():
        style = "-" if num_tokens == longest else "--"
        label = f"{transport}, {num_tokens} tokens"
        axes.plot(*zip(*line, strict=True), f"o{style}", color=COLORS[transport], label=label)
    axes.axhline(HIDDEN_TARGET, color="tab:red", linestyle=":", label="target")
    ticks = sorted({result.chunk_tokens for result in hidden})
    axes.set(
        xscale="log", xlabel="chunk, tokens", ylabel="hidden share", title="KV there before prefill ends"
    )
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize="x-small")
