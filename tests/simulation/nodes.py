"""The processes of the simulated cluster: the real shells, on simulated ports.

Owns what an entry point (`python -m router`, ...) does: it assembles one life of a node.
"""

from __future__ import annotations

import asyncio
import atexit
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from baton.identity import Identity
from baton.models import ModelDir
from baton.ports import WorkerInfo
from baton.process import run_until
from baton.registry import Announcement, registering
from baton.v1 import common_pb2
from baton.v1.decode_service_pb2 import DecodeServiceSessionRequest
from baton.v1.kv_transfer_service_pb2 import PairRequest
from baton.v1.prefill_service_pb2 import PrefillServiceSessionRequest
from decode_worker.service import DecodeServicer
from decode_worker.worker import DecodeWorker
from engine.batch import ForwardBatch
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv_cache import CacheShape, KVCache
from engine.scheduler import Scheduler
from kvtransfer.outgoing import CacheFrame, HostReader
from kvtransfer.sender import KvSender, SenderConfig
from kvtransfer.transports.client import ClientConfig
from kvtransfer.transports.grpc_codec import decode_request
from kvtransfer.transports.service import KvService
from prefill_worker.service import PrefillServicer
from prefill_worker.worker import PrefillWorker
from tests.fakes import FINGERPRINT
from tests.router.tiny_text import byte_tokenizer, model_dir
from tests.simulation.arena import MemoryArena, Wire
from tests.simulation.calls import Caller, Method, Server, ServerCall, Tap
from tests.simulation.channel import SimChannel
from tests.simulation.kv import FrameFaults, SentFrame, SimKvClient
from tests.simulation.net import Network
from tests.simulation.plan import KV_SHAPE, LONGEST, Plan, WorkerPlan
from tests.simulation.registry import RegistryClient, RegistryServer
from tests.simulation.steps import SimStepRunner
from tests.simulation.virtual_loop import Process

# What reading frames out of the cache takes, on another thread than the event loop's.
READ_S = 0.001


@cache
def model(original_length: int = LONGEST) -> ModelDir:
    """A model with a tiny tokenizer, whose weights are never read; its folder goes with the process.

    original_length: tokens up to which its positions keep their first scale.
    """
    if original_length != LONGEST:
        dynamic = {"rope_type": "dynamic", "factor": LONGEST / original_length}
        scaled = {"max_position_embeddings": original_length, "rope_parameters": dynamic}
        return replace(model(), config=model().config | scaled)
    folder = tempfile.mkdtemp(prefix="baton-simulation-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return model_dir(Path(folder) / "tiny")


@cache
def tokenizer() -> Tokenizer:
    """The model's tokenizer, for what a text must be."""
    return byte_tokenizer()


class Surroundings:
    """What every node of one simulation shares."""

    def __init__(
        self,
        plan: Plan,
        net: Network,
        tap: Tap,
        hit: Callable[[str], None],
        fail: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self.model = model(plan.original_length)
        self.net = net
        self.tap = tap
        self.hit = hit
        self.fail = fail
        # The memory of all decode workers that there have been, by nonce.
        self.segments: dict[bytes, MemoryArena] = {}
        self.registry = RegistryServer()
        self.frame_faults = FrameFaults(random.Random(f"{plan.seed}/frames"))


class Node:
    """One life of a node: a process with one shell in it. Subclasses assemble the shell."""

    def __init__(self, name: str, life: int, around: Surroundings) -> None:
        self.name = name
        self.around = around
        self.process = Process(name)
        self.slowness = 1.0
        self.rng = random.Random(f"{around.plan.seed}/{name}/{life}")
        self.incarnation = self.rng.getrandbits(64)

    def identity(self, role: common_pb2.Role.ValueType) -> Identity:
        return Identity(name=self.name, role=role, incarnation=self.incarnation, fingerprint=FINGERPRINT)

    def registry(self) -> RegistryClient:
        return RegistryClient(self.around.registry, self.rng)

    def serve(self, methods: dict[str, Method]) -> Server:
        return Server(self.around.net, self.process, methods, self.around.tap)

    def ledger(self) -> dict[str, int]:
        """Everything the node holds for requests."""
        raise NotImplementedError

    def retire(self, grace_s: float, left: Callable[[], None]) -> None:
        """The node drains as after SIGTERM; left: called as its process would end."""
        raise NotImplementedError


class WorkerNode(Node):
    """What both kinds of workers have in common: an engine, and an announcement."""

    worker: PrefillWorker | DecodeWorker

    def __init__(self, plan: WorkerPlan, life: int, around: Surroundings) -> None:
        super().__init__(plan.name, life, around)
        self.plan = plan
        self.engine = self._engine()
        self._stop = asyncio.Event()
        self._grace_s = 0.0
        self._left: Callable[[], None] = lambda: None

    def ledger(self) -> dict[str, int]:
        return self.worker.ledger()

    def check_blocks(self) -> None:
        """free + used + fenced == total."""
        pool = self.engine.pool
        found = (pool.num_free, pool.num_used, pool.num_fenced)
        assert sum(found) == pool.num_blocks, f"{self.name}: free, used, fenced {found} of {pool.num_blocks}"

    def start(self, methods: dict[str, Method]) -> None:
        """Serves and announces the worker."""
        self.serve(methods)
        self.process.spawn(self._run(), f"steps-{self.name}")

    async def _run(self) -> None:
        info = WorkerInfo(
            name=self.name, role=self.plan.role, incarnation=self.incarnation, address=f"{self.name}:1"
        )
        async with registering(self.registry(), info) as announcement:
            services = (self.worker.run(), announcement.keep())
            await run_until(self._stop, *services, drain=partial(self._drain, announcement))
        self._left()

    async def _drain(self, announcement: Announcement) -> None:
        leaving = replace(announcement.info, draining=True)
        await asyncio.gather(announcement.update(leaving), self.worker.drain(self._grace_s))

    def retire(self, grace_s: float, left: Callable[[], None]) -> None:
        self._grace_s, self._left = grace_s, left
        self._stop.set()

    def _engine(self) -> Engine:
        plan = self.plan
        shape = CacheShape(
            num_blocks=plan.num_blocks,
            num_layers=KV_SHAPE[0],
            num_kv_heads=KV_SHAPE[2],
            block_size=plan.block_size,
            head_dim=KV_SHAPE[3],
            dtype=getattr(torch, plan.dtype),
            layout=plan.layout,
        )
        kv_cache, pool = KVCache(shape), BlockPool(plan.num_blocks, plan.block_size)
        config = EngineConfig(
            block_size=plan.block_size, max_batch_tokens=64, chunk_tokens=16, max_running=16
        )
        runner: Any = SimStepRunner(kv_cache, self._cost_s, self.check_blocks)
        scheduler = Scheduler(pool, self.around.model.limits, config=config)
        return Engine(runner=runner, cache=kv_cache, pool=pool, scheduler=scheduler)

    def _cost_s(self, batch: ForwardBatch) -> float:
        cost_s = self.plan.step_s * (0.5 + batch.num_tokens / 32) * self.rng.uniform(0.8, 1.2)
        return cost_s * self.slowness


class PrefillNode(WorkerNode):
    """A prefill worker."""

    def __init__(self, plan: WorkerPlan, life: int, around: Surroundings) -> None:
        super().__init__(plan, life, around)
        sender = SenderConfig(
            max_frame_bytes=around.plan.max_frame_bytes,
            stall_timeout_s=around.plan.stall_timeout_s,
            has_digests=plan.has_digests,
        )
        reader = HostReader(self.engine.cache)
        identity = self.identity(common_pb2.ROLE_PREFILL)
        self.transport = self._transport(identity, reader)
        self.worker: PrefillWorker = PrefillWorker(
            identity=identity,
            engine=self.engine,
            limits=around.model.limits,
            sender=KvSender(reader, self.transport, sender),
            credit_tokens=plan.credit_tokens,
            pid=1,
            rng=self.rng,
        )
        session = _session(PrefillServicer(self.worker).Session)
        self.start({"prefill": Method(session, PrefillServiceSessionRequest.FromString)})

    def _transport(self, identity: Identity, reader: HostReader) -> SimKvClient:
        plan, around = self.around.plan, self.around
        caller = Caller(around.net, self.process, around.tap)
        rng = random.Random(f"{plan.seed}/{self.name}/{self.incarnation}/kv")

        def dial(address: str) -> SimChannel:
            return SimChannel(caller, address.partition(":")[0], plan.kv_window_bytes)

        async def read_cache(function: Callable[[], Any]) -> Any:
            await asyncio.sleep(READ_S * self.slowness)
            return function()

        return SimKvClient(
            identity,
            reader.format,
            faults=around.frame_faults,
            segment=self._segment,
            posted=self._posted,
            wire=Wire(
                delay_s=plan.carrier_delay_s, failures=plan.carrier_failures, rng=rng, fail=around.fail
            ),
            config=ClientConfig(max_frame_bytes=plan.max_frame_bytes, has_digests=self.plan.has_digests),
            offload=read_cache,
            dial=dial,
        )

    def _segment(self, nonce: bytes) -> MemoryArena | None:
        arena = self.around.segments[nonce]
        hosts = {worker.name: worker.host for worker in self.around.plan.workers}
        return arena if hosts[arena.name] == self.plan.host else None

    def _posted(self, frames: Sequence[SentFrame]) -> None:
        num_computed = {
            request.attempt_id: request.num_computed_tokens for request in self.engine.scheduler.completing
        }
        for frame in frames:
            assert isinstance(frame.frame, CacheFrame)
            spec = frame.frame.spec
            num_tokens = spec.first_block * self.plan.block_size + spec.num_tokens
            if num_tokens > num_computed.get(frame.attempt_id, num_tokens):
                self.around.hit("layers were sent before their step had ended")


class DecodeNode(WorkerNode):
    """A decode worker."""

    def __init__(self, plan: WorkerPlan, life: int, around: Surroundings) -> None:
        super().__init__(plan, life, around)
        self.arena = self._arena() if plan.num_slots else None
        self.worker: DecodeWorker = DecodeWorker(
            identity=self.identity(common_pb2.ROLE_DECODE),
            engine=self.engine,
            limits=around.model.limits,
            pid=1,
            lease_ttl_s=around.plan.lease_ttl_s,
            rng=self.rng,
            arena=self.arena,  # type: ignore[arg-type]
        )
        self.worker.transfer_address = f"{self.name}:1"
        session = _session(DecodeServicer(self.worker).Session)
        kv: Any = self.worker.transfers
        self.start(
            {
                "decode": Method(session, DecodeServiceSessionRequest.FromString),
                "kv": Method(partial(kv.write, None), decode_request),
                "pair": Method(partial(_pair, kv), PairRequest.FromString),
                "connect": Method(_nothing, bytes),
            }
        )

    def check_blocks(self) -> None:
        super().check_blocks()
        if self.arena is not None:
            self.arena.check()

    def _arena(self) -> MemoryArena:
        nonce = random.Random(f"{self.incarnation}/nonce").randbytes(16)
        arena = MemoryArena(self.name, self.plan.num_slots, self.around.plan, nonce, self.around.hit)
        self.around.segments[nonce] = arena
        return arena


def _session(session: Any) -> Callable[[ServerCall], Any]:
    return lambda call: session(call, call)


async def _pair(service: KvService, call: ServerCall) -> None:
    await call.write(await service.pair(await call.read(), call))


async def _nothing(_call: ServerCall) -> None:
    """Answers a connection attempt."""
