"""The processes of the simulated cluster: the real shells, on simulated ports.

Owns what an entry point (`python -m router`, ...) does: it assembles one life of a node.
"""

from __future__ import annotations

import asyncio
import atexit
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from baton.identity import Identity
from baton.models import ModelDir
from baton.ports import WorkerInfo
from baton.registry import registering
from baton.v1 import common_pb2
from baton.v1.decode_service_pb2 import DecodeServiceSessionRequest, DecodeServiceSessionResponse
from baton.v1.inference_service_pb2 import GenerateRequest
from baton.v1.prefill_service_pb2 import PrefillServiceSessionRequest, PrefillServiceSessionResponse
from decode_worker.service import DecodeServicer
from decode_worker.worker import DecodeWorker
from engine.batch import ForwardBatch
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv_cache import CacheShape, KVCache
from engine.scheduler import Scheduler
from kvtransfer.sender import KvSender, SenderConfig
from kvtransfer.transports.grpc import GrpcKvService
from kvtransfer.transports.grpc_codec import decode_request
from prefill_worker.service import PrefillServicer
from prefill_worker.worker import PrefillWorker
from router.buckets import BucketQueue
from router.config import RouterConfig
from router.dispatcher import Dispatcher, Ticket
from router.fleet import Fleet
from router.grammars import GrammarCheck
from router.service import InferenceServicer
from router.text import Text
from tests.fakes import FINGERPRINT
from tests.router.tiny_text import at_once, byte_tokenizer, model_dir
from tests.simulation.calls import Caller, Method, Server, ServerCall, Tap
from tests.simulation.dial import SimDialer
from tests.simulation.kv import FrameFaults, SimKvTransport
from tests.simulation.net import Network
from tests.simulation.plan import KV_SHAPE, Plan, WorkerPlan
from tests.simulation.registry import RegistryClient, RegistryServer
from tests.simulation.steps import SimStepRunner
from tests.simulation.virtual_loop import Process


@cache
def model() -> ModelDir:
    """A model with a tiny tokenizer, whose weights are never read; its folder goes with the process."""
    folder = tempfile.mkdtemp(prefix="baton-simulation-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return model_dir(Path(folder) / "tiny")


@cache
def tokenizer() -> Tokenizer:
    """The model's tokenizer, for what a text must be."""
    return byte_tokenizer()


class Surroundings:
    """What every node of one simulation shares."""

    def __init__(self, plan: Plan, net: Network, tap: Tap, hit: Callable[[str], None]) -> None:
        self.plan = plan
        self.net = net
        self.tap = tap
        self.hit = hit
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

    def serve(self, methods: dict[str, Method]) -> None:
        Server(self.around.net, self.process, methods, self.around.tap)

    def ledger(self) -> dict[str, int]:
        """Everything the node holds for requests."""
        raise NotImplementedError


class WorkerNode(Node):
    """What both kinds of workers have in common: an engine, and an announcement."""

    worker: PrefillWorker | DecodeWorker

    def __init__(self, plan: WorkerPlan, life: int, around: Surroundings) -> None:
        super().__init__(plan.name, life, around)
        self.plan = plan
        self.engine = self._engine()

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
        async with registering(self.registry(), info):
            await self.worker.run()

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
        runner: Any = SimStepRunner(kv_cache, self._step, self.check_blocks)
        scheduler = Scheduler(pool, model().limits, config=config)
        return Engine(runner=runner, cache=kv_cache, pool=pool, scheduler=scheduler)

    async def _step(self, batch: ForwardBatch) -> None:
        cost_s = self.plan.step_s * (0.5 + batch.num_tokens / 32) * self.rng.uniform(0.8, 1.2)
        await asyncio.sleep(cost_s * self.slowness)


class PrefillNode(WorkerNode):
    """A prefill worker."""

    def __init__(self, plan: WorkerPlan, life: int, around: Surroundings) -> None:
        super().__init__(plan, life, around)
        caller = Caller(around.net, self.process, around.tap)
        transport = SimKvTransport(caller, around.frame_faults, around.plan.kv_window_bytes)
        sender = SenderConfig(
            max_frame_bytes=around.plan.max_frame_bytes, stall_timeout_s=around.plan.stall_timeout_s
        )
        self.worker: PrefillWorker = PrefillWorker(
            identity=self.identity(common_pb2.ROLE_PREFILL),
            engine=self.engine,
            limits=model().limits,
            sender=KvSender(self.engine.cache, transport, sender),
            credit_tokens=plan.credit_tokens,
            pid=1,
        )
        session = _session(PrefillServicer(self.worker).Session)
        self.start({"prefill": Method(session, PrefillServiceSessionRequest.FromString)})


class DecodeNode(WorkerNode):
    """A decode worker."""

    def __init__(self, plan: WorkerPlan, life: int, around: Surroundings) -> None:
        super().__init__(plan, life, around)
        self.worker: DecodeWorker = DecodeWorker(
            identity=self.identity(common_pb2.ROLE_DECODE),
            engine=self.engine,
            limits=model().limits,
            pid=1,
            lease_ttl_s=around.plan.lease_ttl_s,
            rng=self.rng,
        )
        self.worker.transfer_address = f"{self.name}:1"
        session = _session(DecodeServicer(self.worker).Session)
        kv: Any = GrpcKvService(self.worker.receiver)
        self.start(
            {
                "decode": Method(session, DecodeServiceSessionRequest.FromString),
                "kv": Method(partial(kv.write, None), decode_request),
                "connect": Method(_nothing, bytes),
            }
        )


class RouterNode(Node):
    """A router with its public door."""

    def __init__(self, name: str, life: int, around: Surroundings) -> None:
        super().__init__(name, life, around)
        config = RouterConfig(
            model="tiny",
            max_queue=around.plan.max_queue,
            max_attempts=around.plan.max_attempts,
            resume_wait_s=3.0,
            write_timeout_s=4.0,
            bucket_edges=(8, 24),
            max_skip_s=3.0,
        )
        self.queue: BucketQueue[Ticket] = BucketQueue(
            config.bucket_edges, max_items=config.max_queue, max_skip_s=config.max_skip_s
        )
        dispatcher = Dispatcher(self.queue, grace_s=config.resume_wait_s)
        self.fleet = Fleet(
            registry=self.registry(),
            identity=self.identity(common_pb2.ROLE_ROUTER),
            prefill_dialer=self._dialer("prefill", PrefillServiceSessionResponse.FromString),
            decode_dialer=self._dialer("decode", DecodeServiceSessionResponse.FromString),
            rng=self.rng,
            on_change=dispatcher.kick,
        )
        dispatcher.attach(self.fleet)
        self.inference = InferenceServicer(
            config=config,
            model=model(),
            text=Text(model(), at_once),
            grammars=GrammarCheck(None, at_once),
            queue=self.queue,
            dispatcher=dispatcher,
            fleet=self.fleet,
            rng=self.rng,
        )
        generate: Any = self.inference.Generate
        self.serve({"generate": Method(partial(_generate, generate), GenerateRequest.FromString)})
        self.process.spawn(self.fleet.run(), f"fleet-{name}")

    def ledger(self) -> dict[str, int]:
        links = self.fleet.links
        return {
            "requests": self.inference.num_requests,
            "queued": len(self.queue),
            "attempts": sum(link.num_attempts for link in links),
            "spent": sum(getattr(link, "spent", 0) for link in links),
            "asked": sum(len(getattr(link, "_asked", ())) for link in links),
        }

    def _dialer(self, kind: str, decode: Callable[[bytes], Any]) -> SimDialer:
        caller = Caller(self.around.net, self.process, self.around.tap)
        return SimDialer(kind, decode, caller, self.around.hit)


def _session(session: Any) -> Callable[[ServerCall], Any]:
    return lambda call: session(call, call)


async def _generate(generate: Any, call: ServerCall) -> None:
    # The request came with the opening; nobody else reads.
    await generate(await call.read(), call)


async def _nothing(_call: ServerCall) -> None:
    """Answers a connection attempt."""
