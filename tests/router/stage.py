"""A router's inside with workers that a test plays, message by message."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from baton.errors import BatonError
from baton.failure import to_failure
from baton.identity import Identity
from baton.limits import Limits
from baton.ports import WorkerInfo
from baton.sampling import SamplingParams
from baton.telemetry import Span
from baton.v1 import common_pb2, decode_service_pb2, prefill_service_pb2
from router.assignment import Ticket
from router.config import RouterConfig
from router.core import RouterCore
from router.decode_link import DecodeLink
from router.dispatcher import Dispatcher
from router.fleet import Fleet
from router.generation import Generation
from router.queueing.buckets import BucketQueue
from router.request import GenerationRequest
from router.timeline import Timeline
from router.token_stream import TokenStream
from tests.fakes import FINGERPRINT, GUARD_S, FakeRegistry, MemoryDialer, MemorySession, until

PrefillUp = prefill_service_pb2.PrefillServiceSessionResponse
DecodeUp = decode_service_pb2.DecodeServiceSessionResponse
Failure = common_pb2.Failure
NOBODY: Mapping[str, BatonError] = {}
LIMITS = Limits(max_model_len=10_000, vocab_size=10_000)
# Routers of one test must not draw the same attempt ids.
SEEDS = itertools.count()


class PlayedWorker:
    """A worker whose side of the session is the test. Heartbeats flow by themselves."""

    up: Any

    def __init__(self, name: str, role: common_pb2.Role.ValueType, incarnation: int) -> None:
        self.identity = Identity(name=name, role=role, incarnation=incarnation, fingerprint=FINGERPRINT)
        self.commands: asyncio.Queue[Any] = asyncio.Queue()
        self.session: MemorySession | None = None
        self.num_sessions = 0

    async def serve(self, session: MemorySession) -> None:
        self.session = session
        self.num_sessions += 1
        session.send(self.up(hello=self.identity.hello()))
        self.open(session)
        async for message in session:
            self.hear(message)

    def hear(self, message: Any) -> None:
        if message.WhichOneof("message") not in ("hello", "heartbeat"):
            self.commands.put_nowait(message)

    def open(self, session: MemorySession) -> None:
        raise NotImplementedError

    def send(self, **message: Any) -> None:
        assert self.session is not None
        self.session.send(self.up(**message))

    async def command(self, kind: str) -> Any:
        """The next command, which must be of that kind."""
        async with asyncio.timeout(GUARD_S):
            message = await self.commands.get()
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    def token(self, attempt_id: bytes, start: int, *token_ids: int, end: bool = False) -> Any:
        reason = common_pb2.FINISH_REASON_LENGTH if end else common_pb2.FINISH_REASON_UNSPECIFIED
        return common_pb2.TokenEvent(
            attempt_id=attempt_id, start_index=start, token_ids=token_ids, finish_reason=reason
        )


class PlayedPrefill(PlayedWorker):
    """A prefill worker that answers introductions by itself.

    unreachable: why it cannot reach decode workers, by their name; it reaches all others.
    silent_about: decode workers of which it says nothing.
    introductions: what it was told of decode workers, over all of its sessions.
    """

    up = PrefillUp

    def __init__(
        self, name: str, incarnation: int, budget: int, unreachable: Mapping[str, BatonError]
    ) -> None:
        super().__init__(name, common_pb2.ROLE_PREFILL, incarnation)
        self.budget = budget
        self.num_blocks = 1000
        self.unreachable = dict(unreachable)
        self.silent_about: set[str] = set()
        self.introductions: list[Any] = []

    def hear(self, message: Any) -> None:
        match message.WhichOneof("message"):
            case "pair":
                self.introductions.append(message.pair)
                if message.pair.worker in self.silent_about:
                    return
                error = self.unreachable.get(message.pair.worker)
                state = {"failure": to_failure(error)} if error else {"transport": "grpc"}
                self.pair_status(message.pair.incarnation, **state)
            case "part":
                self.introductions.append(message.part)
            case _:
                super().hear(message)

    def pair_status(self, incarnation: int, **state: Any) -> None:
        self.send(pair_status=prefill_service_pb2.PairStatus(incarnation=incarnation, **state))

    def open(self, session: MemorySession) -> None:
        capacity = prefill_service_pb2.PrefillCapacity(
            num_blocks=self.num_blocks, block_size=16, chunk_tokens=128, max_batch_tokens=256
        )
        session.send(PrefillUp(capacity=capacity))
        self.grant(self.budget)

    def grant(self, tokens: int, *, share: int | None = None) -> None:
        self.send(
            credit_grant=prefill_service_pb2.CreditGrant(tokens=tokens, share_tokens=share or self.budget)
        )

    def first_token(self, command: Any, token_id: int, *, start: int = 0, end: bool = False) -> None:
        self.grant(command.cost_tokens)
        self.send(token=self.token(command.attempt_id, start, token_id, end=end))

    def ended(self, attempt_id: bytes, **outcome: Any) -> None:
        self.send(ended=prefill_service_pb2.PrefillEnded(attempt_id=attempt_id, **outcome))


class PlayedDecode(PlayedWorker):
    up = DecodeUp

    def __init__(self, name: str, incarnation: int, num_blocks: int) -> None:
        super().__init__(name, common_pb2.ROLE_DECODE, incarnation)
        self.num_blocks = num_blocks

    def open(self, session: MemorySession) -> None:
        capacity = decode_service_pb2.DecodeCapacity(
            num_blocks=self.num_blocks,
            block_size=16,
            transfer_address=f"kv-of-{self.identity.name}",
            mixed_tokens=64,
            max_running=64,
            chunk_tokens=128,
            max_batch_tokens=256,
        )
        session.send(DecodeUp(capacity=capacity))

    async def grant(self) -> Any:
        """Grants the next reservation and returns its command."""
        command = await self.command("reserve")
        result = decode_service_pb2.ReserveResult(
            attempt_id=command.attempt_id,
            lease=decode_service_pb2.Lease(lease_id=b"L" * 16),
            num_free_blocks=self.num_blocks,
        )
        self.send(reserve_result=result)
        return command

    async def refuse(self, failure: Failure) -> None:
        command = await self.command("reserve")
        self.send(
            reserve_result=decode_service_pb2.ReserveResult(
                attempt_id=command.attempt_id,
                refusal=decode_service_pb2.Refusal(failure=failure),
                num_free_blocks=self.num_blocks,
            )
        )

    def tokens(self, attempt_id: bytes, start: int, *token_ids: int, end: bool = False) -> None:
        event = self.token(attempt_id, start, *token_ids, end=end)
        self.send(step=decode_service_pb2.StepEvents(tokens=[event], num_free_blocks=self.num_blocks))

    def committed(self, attempt_id: bytes) -> None:
        self.send(lease_outcome=decode_service_pb2.LeaseOutcome(attempt_id=attempt_id, committed=True))

    def gone(self, attempt_id: bytes) -> None:
        reason = common_pb2.GONE_REASON_CANCELLED
        self.send(lease_outcome=decode_service_pb2.LeaseOutcome(attempt_id=attempt_id, gone=reason))


@dataclass
class Run:
    """A generation under way and what its client got."""

    generation: Generation
    task: asyncio.Task[None]
    stream: TokenStream

    async def answer(self) -> list[int]:
        """Tokens as the client saw them, once the generation has ended well."""
        async with asyncio.timeout(GUARD_S):
            await self.task
        return self.received()

    def received(self) -> list[int]:
        return self.stream._waiting.token_ids


@dataclass
class Stage:
    registry: FakeRegistry
    dialer: MemoryDialer
    queue: BucketQueue[Ticket]
    dispatcher: Dispatcher
    fleet: Fleet
    config: RouterConfig
    core: RouterCore
    numbers: Any = field(default_factory=lambda: itertools.count(1))
    runs: list[Run] = field(default_factory=list)

    async def prefill(
        self, name: str = "prefill-0", budget: int = 4096, unreachable: Mapping[str, BatonError] = NOBODY
    ) -> PlayedPrefill:
        worker = PlayedPrefill(name, next(self.numbers), budget, unreachable)
        await self.enter(worker, "prefill")
        await until(lambda: any(link.name == name and link.credit for link in self.fleet.prefill_links()))
        return worker

    async def decode(self, name: str = "decode-0", num_blocks: int = 64) -> PlayedDecode:
        worker = PlayedDecode(name, next(self.numbers), num_blocks)
        await self.enter(worker, "decode")
        return worker

    async def enter(self, worker: PlayedWorker, role: str) -> None:
        name = worker.identity.name
        self.dialer.workers[name] = worker.serve
        self.registry.announce(info_of(worker, role))
        await until(lambda: any(link.name == name and link.is_ready for link in self.fleet.links))
        await until(self.all_introduced)

    def all_introduced(self) -> bool:
        """Whether every prefill worker has said how it stands with every decode worker."""
        return not any(
            "has not tried yet" in pair.reason
            for link in self.fleet.prefill_links()
            for pair in link.status().pairs
        )

    def kill(self, name: str) -> None:
        """The process is gone: its sessions break, and nobody answers any more."""
        self.dialer.workers.pop(name, None)
        self.registry.withdraw(name)
        self.dialer.cut(name)

    def cut_off(self, name: str) -> None:
        """Nobody reaches the process any more; it lives, and the registry says so."""
        self.dialer.workers.pop(name, None)
        self.dialer.cut(name)

    def generate(
        self,
        num_prompt_tokens: int = 20,
        *,
        timeout_s: float | None = None,
        beside: DecodeLink | None = None,
        sample_index: int = 0,
        limits: Limits = LIMITS,
        outputs: Sequence[int] = (),
        **params: Any,
    ) -> Run:
        """outputs: tokens of the answer that its client has from another router."""
        loop = asyncio.get_running_loop()
        request = GenerationRequest(
            request_id="r",
            prompt_token_ids=list(range(num_prompt_tokens)),
            output_token_ids=list(outputs),
            params=SamplingParams(temperature=0, **({"max_tokens": 4} | params)),
            deadline_at=None if timeout_s is None else loop.time() + timeout_s,
            arrived_at=loop.time(),
            sample_index=sample_index,
        )
        stream = TokenStream(len(outputs))
        generation = Generation(
            request,
            config=self.config,
            dispatcher=self.dispatcher,
            fleet=self.fleet,
            limits=limits,
            stream=stream,
            outlook=self.core.outlook,
            timeline=Timeline(request.arrived_at),
            span=Span(None, ""),
            rng=random.Random(next(SEEDS)),
            beside=beside,
        )
        run = Run(generation, loop.create_task(generation.run()), stream)
        self.runs.append(run)
        return run

    def held(self) -> dict[str, int]:
        """Everything the router holds for requests."""
        return {
            "queued": len(self.queue),
            "attempts": sum(link.num_attempts for link in self.fleet.links),
            "spent": sum(getattr(link, "spent", 0) for link in self.fleet.links),
            "asked": sum(sum(link._asked.values()) for link in self.fleet.decode_links()),
        }


NOTHING = {"queued": 0, "attempts": 0, "spent": 0, "asked": 0}


def info_of(worker: PlayedWorker, role: str, *, draining: bool = False) -> WorkerInfo:
    identity = worker.identity
    return WorkerInfo(
        name=identity.name,
        role=role,
        incarnation=identity.incarnation,
        address="memory:1",
        draining=draining,
    )


@asynccontextmanager
async def staged(**settings: Any) -> AsyncIterator[Stage]:
    """A router's inside that follows an empty registry."""
    config = RouterConfig(
        model="m", **({"resume_wait_s": 0.2, "max_wait_s": 60.0, "placement": "disaggregated"} | settings)
    )
    registry, dialer = FakeRegistry(), MemoryDialer()
    identity = Identity(name="router-0", role=common_pb2.ROLE_ROUTER, incarnation=99, fingerprint=FINGERPRINT)
    core = RouterCore.assemble(
        config,
        identity=identity,
        registry=registry,
        prefill_dialer=dialer,
        decode_dialer=dialer,
        rng=random.Random(0),
    )
    queue, dispatcher, fleet = core.queue, core.dispatcher, core.fleet
    stage = Stage(registry, dialer, queue, dispatcher, fleet, config, core)
    following = asyncio.create_task(fleet.run())
    try:
        yield stage
    finally:
        for task in (*(run.task for run in stage.runs), following):
            task.cancel()
        await asyncio.gather(*(run.task for run in stage.runs), following, return_exceptions=True)
        dispatcher.close()


async def workers(stage: Stage) -> tuple[PlayedPrefill, PlayedDecode]:
    return await stage.prefill(), await stage.decode()


async def to_prefill(prefill: PlayedPrefill, decode: PlayedDecode) -> Any:
    """Plays an attempt up to its PrefillCommand, and returns that."""
    await decode.grant()
    return await prefill.command("prefill")


async def to_decode(prefill: PlayedPrefill, decode: PlayedDecode, token_id: int = 70) -> bytes:
    """Plays an attempt up to its committed KV, the first token delivered by both sides."""
    command = await to_prefill(prefill, decode)
    attempt_id: bytes = command.attempt_id
    start = len(command.sequence.token_ids) - command.sequence.num_prompt_tokens
    prefill.first_token(command, token_id, start=start)
    decode.committed(attempt_id)
    decode.tokens(attempt_id, start, token_id)
    prefill.ended(attempt_id, committed=True)
    return attempt_id


async def failure(run: Run) -> BaseException:
    async with asyncio.timeout(GUARD_S):
        await asyncio.wait([run.task])
    error = run.task.exception()
    assert error is not None
    return error
