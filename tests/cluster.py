"""A whole cluster in one process: the real shells of all three roles, over in-memory sessions and KV."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.identity import Identity
from baton.limits import Limits
from baton.ports import WorkerInfo
from baton.v1 import common_pb2
from decode_worker.worker import DecodeWorker
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv_cache import CacheShape, KVCache
from engine.scheduler import Scheduler
from kvtransfer.outgoing import HostReader
from kvtransfer.sender import KvSender, SenderConfig
from prefill_worker.worker import PrefillWorker
from tests.fakes import FINGERPRINT, VOCAB, GatedRunner, KvNetwork, expected_answer, until
from tests.router.stage import NOTHING, Run, Stage, staged

LIMITS = Limits(max_model_len=10_000, vocab_size=10_000)
EOS = VOCAB - 1

torch.set_num_threads(1)


def make_engine(
    num_blocks: int = 64,
    *,
    block_size: int = 4,
    layout: str = "HND",
    dtype: torch.dtype = torch.float32,
    prefix_cache: bool = True,
    limits: Limits = LIMITS,
) -> Engine:
    """A tiny real cache, pool and scheduler behind a GatedRunner."""
    shape = CacheShape(
        num_blocks=num_blocks,
        num_layers=2,
        num_kv_heads=3,
        block_size=block_size,
        head_dim=5,
        dtype=dtype,
        layout=layout,
    )
    cache = KVCache(shape)
    pool = BlockPool(num_blocks, block_size, prefix_cache=prefix_cache)
    config = EngineConfig(block_size=block_size, max_batch_tokens=64, chunk_tokens=16, max_running=32)
    scheduler = Scheduler(pool, limits, config=config, eos_token_ids=())
    runner: Any = GatedRunner(cache)
    return Engine(runner=runner, cache=cache, pool=pool, scheduler=scheduler)


def identity_of(name: str, role: common_pb2.Role.ValueType, incarnation: int) -> Identity:
    return Identity(name=name, role=role, incarnation=incarnation, fingerprint=FINGERPRINT)


def make_prefill(
    name: str,
    incarnation: int,
    network: KvNetwork,
    *,
    credit_tokens: int = 400,
    engine: Engine | None = None,
    limits: Limits = LIMITS,
    **options: Any,
) -> PrefillWorker:
    engine = engine or make_engine(limits=limits, **options)
    config = SenderConfig(max_frame_bytes=1000, stall_timeout_s=2.0)
    return PrefillWorker(
        identity=identity_of(name, common_pb2.ROLE_PREFILL, incarnation),
        engine=engine,
        limits=limits,
        sender=KvSender(HostReader(engine.cache), network, config),
        credit_tokens=credit_tokens,
        pid=1,
        rng=random.Random(incarnation),
    )


def make_decode(
    name: str,
    incarnation: int,
    network: KvNetwork,
    *,
    lease_ttl_s: float = 10.0,
    engine: Engine | None = None,
    limits: Limits = LIMITS,
    **options: Any,
) -> DecodeWorker:
    worker = DecodeWorker(
        identity=identity_of(name, common_pb2.ROLE_DECODE, incarnation),
        engine=engine or make_engine(limits=limits, **options),
        limits=limits,
        pid=1,
        lease_ttl_s=lease_ttl_s,
        rng=random.Random(incarnation),
    )
    worker.transfer_address = f"kv-{name}-{incarnation}"
    network.receivers[worker.transfer_address] = worker.receiver
    return worker


@dataclass
class Cluster:
    stage: Stage
    network: KvNetwork = field(default_factory=KvNetwork)
    workers: dict[str, PrefillWorker | DecodeWorker] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    numbers: Any = field(default_factory=lambda: itertools.count(1000))

    async def prefill(self, name: str = "prefill-0", **options: Any) -> PrefillWorker:
        worker = make_prefill(name, next(self.numbers), self.network, **options)
        await self._enter(name, "prefill", worker)
        await until(
            lambda: any(link.name == name and link.credit for link in self.stage.fleet.prefill_links())
        )
        return worker

    async def decode(self, name: str = "decode-0", **options: Any) -> DecodeWorker:
        worker = make_decode(name, next(self.numbers), self.network, **options)
        await self._enter(name, "decode", worker)
        return worker

    async def _enter(self, name: str, role: str, worker: PrefillWorker | DecodeWorker) -> None:
        self.workers[name] = worker
        self.tasks[name] = asyncio.create_task(worker.run(), name=f"steps-{name}")
        self.stage.dialer.workers[name] = worker.serve
        incarnation = worker._identity.incarnation
        self.stage.registry.announce(
            WorkerInfo(name=name, role=role, incarnation=incarnation, address="memory:1")
        )
        fleet = self.stage.fleet
        await until(
            lambda: any(link.info.incarnation == incarnation and link.is_ready for link in fleet.links)
        )
        await until(self.stage.all_introduced)

    async def kill(self, name: str) -> None:
        """The process is gone: no steps, no sessions, no KV endpoint."""
        worker = self.workers.pop(name)
        self.network.receivers.pop(getattr(worker, "transfer_address", ""), None)
        self.tasks[name].cancel()
        await asyncio.wait([self.tasks.pop(name)])
        self.stage.kill(name)
        # A process that is gone sends nothing more, whatever its tasks here have still to do.
        await until(lambda: worker.ledger().get("transfers", 0) == 0)

    def ledgers(self) -> dict[str, dict[str, int]]:
        return {"router": self.stage.held()} | {name: w.ledger() for name, w in self.workers.items()}

    async def idle(self) -> None:
        """Waits until nobody holds anything, without any new request to trigger it."""
        await until(lambda: all(not any(held.values()) for held in self.ledgers().values()))

    def expected(self, run: Run, *, rope_steps: Sequence[int] = ()) -> list[int]:
        """The undisturbed answer, from the prompt alone. rope_steps: those that its workers should go by."""
        request = run.generation.request
        return expected_answer(
            request.prompt_token_ids, request.params.max_tokens, (2, 2, 3, 5), rope_steps=rope_steps
        )


@asynccontextmanager
async def cluster(num_prefill: int = 1, num_decode: int = 1, **settings: Any) -> AsyncIterator[Cluster]:
    async with staged(**settings) as stage:
        made = Cluster(stage)
        for number in range(num_prefill):
            await made.prefill(f"prefill-{number}")
        for number in range(num_decode):
            await made.decode(f"decode-{number}")
        try:
            yield made
        finally:
            for task in made.tasks.values():
                task.cancel()
            await asyncio.gather(*made.tasks.values(), return_exceptions=True)


__all__ = ["NOTHING", "Cluster", "cluster", "make_decode", "make_engine", "make_prefill"]
