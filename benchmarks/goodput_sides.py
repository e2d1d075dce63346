"""The sides that are compared: clusters of equal cores, and how each is started.

Owns the settings of every side and the life of a cluster under load. A side computes with two threads in
all, whatever its workers are; router and client come on top, on every side alike.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton import AsyncClient, Retry
from baton.bench.grpc_door import ClusterTarget
from baton.bench.open_loop import offer
from baton.bench.outcome import Planned
from baton.bench.target import Bounds, Target
from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from benchmarks.workload import Workload

DISAGGREGATED = "disaggregated"
COLOCATED = "colocated"
CHUNKS = (64, 128, 256, 512)
WHOLE = "whole"
# The engine's default: every request that decodes takes a token of the step's budget.
MAX_RUNNING = 64
# Of a side's workers together, so that no side caches or holds more than another. Room for 30,000 tokens of
# the default model.
KV_BYTES = 768 << 20
# Above every prompt.
UNCAPPED = 1 << 20
# So far apart are the warm-up's prompts from every window's: seeds of windows count from 0.
_WARM_UP_SEED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to use the cores.

    cluster: fields of ClusterConfig.  tables: settings of roles, by table of their configuration file.
    """

    name: str
    cluster: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def is_control(self) -> bool:
        """Whether it is what we compare with."""
        return self.name.startswith(COLOCATED)

    @property
    def is_unchunked(self) -> bool:
        """Whether it computes every prompt in one step."""
        return self.name.endswith(WHOLE)

    def config_file(self, folder: Path) -> Path:
        """Writes the roles' tables as TOML."""
        path = folder / "baton.toml"
        lines = []
        for table, settings in self.tables.items():
            lines += [f"[{table}]", *(f"{name} = {value}" for name, value in settings.items())]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path


def product_sides() -> list[Side]:
    """Ours: one prefill and one decode worker, with the defaults as they ship, and auto without its cap."""
    cores = {"prefill": 1, "decode": 1, "threads": 1}
    uncapped = {"router": {"local_max_tokens": UNCAPPED}}
    return [
        Side(name=DISAGGREGATED, cluster={**cores, "placement": DISAGGREGATED}),
        Side(name="auto", cluster={**cores, "placement": "auto"}),
        Side(name="auto, any length", cluster={**cores, "placement": "auto"}, tables=uncapped),
    ]


def control_sides(longest_prompt: int) -> list[Side]:
    """Everything on every worker: two workers of one thread and one of two, for every chunk size."""
    chunks = {f"chunk {chunk}": chunk for chunk in CHUNKS} | {WHOLE: longest_prompt}
    shapes = {"2 x 1 thread": (2, 1), "1 x 2 threads": (1, 2)}
    return [
        Side(
            name=f"{COLOCATED} {shape}, {label}",
            cluster={"prefill": 0, "decode": workers, "threads": threads, "placement": COLOCATED},
            tables={"decode": _chunk_settings(chunk)},
        )
        for shape, (workers, threads) in shapes.items()
        for label, chunk in chunks.items()
    ]


def _chunk_settings(chunk: int) -> dict[str, int]:
    # mixed_tokens too: a control that held back prompts while it decodes would not be swept at all.
    return {
        "chunk_tokens": chunk,
        "mixed_tokens": chunk,
        "max_batch_tokens": chunk + MAX_RUNNING,
    }


@asynccontextmanager
async def running(side: Side, model: str, folder: Path, workload: Workload) -> AsyncIterator[Target]:
    """The side's cluster, warm; gone after the block."""
    config = ClusterConfig(
        **side.cluster,
        model=model,
        kv_cache_bytes=KV_BYTES // _num_workers(side),
        ray=False,
        port=0,
        admin_port=0,
        control_port=0,
        http_port=0,
        drain_s=1.0,
        log_level="warning",
    )
    place = folder / "".join(letter if letter.isalnum() else "-" for letter in side.name)
    place.mkdir(exist_ok=True)
    config_file = str(side.config_file(place)) if side.tables else ""
    async with (
        await LocalCluster.start(config, config_file=config_file) as cluster,
        await AsyncClient.connect(cluster.address, retry=Retry(max_attempts=1)) as client,
    ):
        target = ClusterTarget(client)
        await warm_up(target, workload)
        yield target


def _num_workers(side: Side) -> int:
    return int(side.cluster["prefill"]) + int(side.cluster["decode"])


async def warm_up(target: Target, workload: Workload) -> None:
    """Short and long prompts, alone and together, so that a router has seen what they cost."""
    ids = random.Random(_WARM_UP_SEED)
    vocabulary = range(min(100, workload.vocab_size // 2), workload.vocab_size)

    def prompts(*lengths: int) -> list[Planned]:
        return [
            Planned(at_s=0.0, token_ids=tuple(ids.choices(vocabulary, k=length)), max_tokens=8)
            for length in lengths
        ]

    for length in (64, workload.longest // 4, workload.longest // 2):
        await offer(target, prompts(length), Bounds())
    await offer(target, prompts(16, 32, 64, 100, 100, workload.longest // 4), Bounds())
