"""The last chunk of a prompt travels layer by layer, while its step is still computed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from engine.batch import ForwardBatch, StepOutput
from engine.kv_cache import KVCache
from engine.model.tattletale import TattleTaleRunner
from engine.step_runner import OnLayers
from engine.stored import DONE, Stored
from kvtransfer.outgoing import HostReader, Payload
from kvtransfer.wire import FrameSpec
from tests.fakes import VOCAB, expected_answer, kv_rows, until
from tests.prefill_worker.test_worker import KV, A, B, Rig, rig

# Bytes of a token's KV in both layers.
TOKEN_BYTES = 2 * 2 * 3 * 5 * 4


class LayerwiseRunner:
    """A StepRunner of the tattle-tale model that a test lets go on: once per layer, and once to end the step.

    is_finite: whether the model's numbers are.  stored: what the news says, by layer.
    tells: whether there is news.
    """

    def __init__(self, cache: KVCache) -> None:
        self._runner = TattleTaleRunner(cache, VOCAB)
        self._num_layers = cache.shape.num_layers
        self._turns = asyncio.Semaphore(0)
        self.num_waiting = 0
        self.is_finite = True
        self.stored = [DONE] * self._num_layers
        self.tells = True

    def go_on(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self._turns.release()

    async def execute(self, batch: ForwardBatch, on_layers: OnLayers | None = None) -> StepOutput:
        stored = self._runner.store_layers(batch)
        for _ in range(self._num_layers):
            await self._turn()
            num_layers = next(stored)
            if on_layers is not None and self.tells:
                on_layers(num_layers, self.stored[num_layers - 1])
        await self._turn()
        output = self._runner.sample(batch)
        return dataclasses.replace(output, finite=output.finite & self.is_finite)

    async def _turn(self) -> None:
        self.num_waiting += 1
        await self._turns.acquire()
        self.num_waiting -= 1


@dataclasses.dataclass
class Layers:
    rig: Rig
    runner: LayerwiseRunner

    async def arrive(self, num_frames: int) -> None:
        """Waits until so many frames have arrived, and whatever else is on its way."""
        await until(lambda: self.rig.decode.receiver.counters["frames"] >= num_frames)
        for _ in range(50):
            await asyncio.sleep(0)
        assert self.rig.decode.receiver.counters["frames"] == num_frames

    def holds(self, attempt_id: bytes, prompt: list[int]) -> list[list[bool]]:
        """[layer][token]: whether the receiver has exactly that KV of the prompt."""
        lease = self.rig.decode._leases.get(attempt_id)
        logical = self.rig.decode._engine.cache.logical[list(lease.block_ids)]
        # [N, L, 2, K, slot, h] to [token, L, 2, K, h].
        found = logical.permute(0, 4, 1, 2, 3, 5).reshape(-1, *KV)[: len(prompt)].numpy()
        right = (found == kv_rows(prompt, KV).astype(np.float32)).all(axis=(2, 3, 4))
        return [list(layer) for layer in right.T]

    def heard(self) -> list[str]:
        """What the router was told since the session began, of attempts."""
        session = self.rig.router.session._other
        assert session is not None
        kinds = [message.WhichOneof("message") for message in session.sent]
        return [kind for kind in kinds if kind not in ("heartbeat", "cache_changes")][4:]


@asynccontextmanager
async def layers() -> AsyncIterator[Layers]:
    async with rig() as r:
        runner = LayerwiseRunner(r.worker._engine.cache)
        r.worker._steps._runner = runner
        yield Layers(r, runner)


async def test_frames_of_the_last_chunk_arrive_before_its_step_has_ended() -> None:
    prompt = list(range(40))
    async with layers() as made:
        r, runner = made.rig, made.runner
        r.prefill(A, prompt)
        # Chunks of 16, 16 and 8 tokens. Of a block of 4 tokens both layers fit into one frame.
        runner.go_on(6)
        await made.arrive(8)
        runner.go_on(1)
        # Two blocks of one layer fit into one frame.
        await made.arrive(9)
        assert made.holds(A, prompt) == [[True] * 40, [True] * 32 + [False] * 8]
        runner.go_on(1)
        await made.arrive(10)
        assert made.holds(A, prompt) == [[True] * 40] * 2
        # The step goes on: there is no token, and nothing is committed.
        assert (made.heard(), runner.num_waiting) == ([], 1)
        assert r.decode._leases.get(A).is_uncommitted
        runner.go_on(1)
        await r.router.next("credit_grant")
        assert list((await r.router.next("token")).token_ids) == expected_answer(prompt, 1, KV)
        ended = await r.router.next("ended")
        assert (ended.committed, ended.transfer_bytes, ended.transfer_hidden_share) == (
            True,
            40 * TOKEN_BYTES,
            1.0,
        )
        assert not r.decode._leases.get(A).is_uncommitted
        await until(r.nothing)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Stored]]:
    """(first block, what it waited for) of each frame that is read."""
    heard: list[tuple[int, Stored]] = []
    read = HostReader.read

    def listen(reader: HostReader, block_ids: Sequence[int], spec: FrameSpec, stored: Stored) -> Payload:
        heard.append((spec.first_block, stored))
        return read(reader, block_ids, spec, DONE)

    monkeypatch.setattr(HostReader, "read", listen)
    return heard


def news() -> list[Stored]:
    """Of two layers of one step."""
    step = object()
    return [Stored(object(), step) for _ in range(2)]  # type: ignore[arg-type]


@pytest.mark.parametrize("is_late", [False, True], ids=["while the step runs", "after it"])
async def test_who_reads_a_frame_hears_of_its_last_layer_and_of_the_second_place(
    heard: list[tuple[int, Stored]], is_late: bool
) -> None:
    async with layers() as made:
        r, runner = made.rig, made.runner
        r.prefill(A, list(range(24)))
        runner.go_on(3)
        await made.arrive(4)
        # The first chunk's step has ended: of it there is nothing to wait for, and nothing elsewhere.
        assert heard == [(index, DONE) for index in range(4)]
        first, second = runner.stored = news()
        runner.go_on(1)
        await made.arrive(5)
        assert heard[4:] == [(4, first)]
        # Of a layer that nobody was told of, the frame is sent once the step has ended.
        runner.tells = not is_late
        runner.go_on(1 + is_late)
        await made.arrive(6)
        runner.go_on(1 - is_late)
        await until(r.nothing)
    assert heard[5:] == [(4, Stored(staged=second.staged) if is_late else second)]


async def test_layers_told_of_before_the_transfer_is_open_are_each_waited_for(
    heard: list[tuple[int, Stored]],
) -> None:
    async with layers() as made:
        r, runner = made.rig, made.runner
        first, second = runner.stored = news()
        # Both in one turn of the loop: two and a half blocks of a layer make two frames.
        runner.go_on(2)
        r.prefill(A, list(range(10)))
        await made.arrive(4)
        assert heard == [(0, first), (2, first), (0, second), (2, second)]
        runner.go_on(1)
        await until(r.nothing)


async def test_what_was_cached_is_sent_as_the_first_layer_is_there() -> None:
    prompt = list(range(40))
    async with layers() as made:
        r, runner = made.rig, made.runner
        runner.go_on(9)
        r.prefill(A, prompt, max_tokens=1)
        await r.router.next("credit_grant")
        await r.router.next("token")
        assert (await r.router.next("ended")).finished
        # 40 tokens of it are cached, of which the last is computed again: one block.
        r.prefill(B, prompt)
        await until(lambda: runner.num_waiting == 1)
        assert r.decode.receiver.counters["frames"] == 0
        runner.go_on(1)
        await made.arrive(9 + 1)
        assert made.holds(B, prompt) == [[True] * 40, [True] * 36 + [False] * 4]
        runner.go_on(2)
        await r.router.next("credit_grant")
        await r.router.next("token")
        ended = await r.router.next("ended")
        assert (ended.committed, ended.prefill.num_cached_tokens) == (True, 36)
        assert made.holds(B, prompt) == [[True] * 40] * 2


async def test_a_request_that_fails_in_its_last_step_commits_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompt = list(range(10))
    async with layers() as made:
        r, runner = made.rig, made.runner
        committed = list[bytes]()
        r.decode.receiver.on_committed = lambda lease, _token: committed.append(lease.attempt_id)
        runner.is_finite = False
        r.prefill(A, prompt)
        # Two and a half blocks of a layer make two frames.
        runner.go_on(1)
        await made.arrive(2)
        runner.go_on(1)
        await made.arrive(4)
        assert made.holds(A, prompt) == [[True] * 10] * 2
        assert r.decode.receiver.num_open_writes == 1
        runner.go_on(1)
        await r.router.next("credit_grant")
        assert (await r.router.next("ended")).failure.code == "NON_FINITE_LOGITS"
        assert [record.msg["event"] for record in caplog.records if record.levelname == "WARNING"] == [
            "logits are not finite"
        ]
        await until(lambda: r.nothing() and r.decode.receiver.num_open_writes == 0)
        assert committed == []
        assert r.decode._leases.get(A).is_uncommitted


async def test_a_request_that_is_cancelled_between_two_layers_commits_nothing() -> None:
    async with layers() as made:
        r, runner = made.rig, made.runner
        r.prefill(A, list(range(10)))
        runner.go_on(1)
        await made.arrive(2)
        r.router.send(cancel={"attempt_id": A})
        await r.router.next("credit_grant")
        assert (await r.router.next("ended")).cancelled
        await until(lambda: r.decode.receiver.num_open_writes == 0)
        # The step writes to them still.
        assert r.worker.ledger()["blocks_fenced"] == 3
        runner.go_on(2)
        await until(r.nothing)
        assert r.decode.receiver.counters["frames"] == 2
        assert r.decode._leases.get(A).is_uncommitted


async def test_of_the_prompts_in_a_step_only_those_that_it_completes_travel_by_layers() -> None:
    short, long = list(range(10)), list(range(50, 80))
    async with layers() as made:
        r, runner = made.rig, made.runner
        # In a step of its own first, so that the two others meet in the next.
        r.prefill(b"C" * 16, [1, 2, 3], max_tokens=1, cost=3)
        await until(lambda: runner.num_waiting == 1)
        r.prefill(A, short, cost=10)
        r.prefill(B, long, cost=30)
        await until(lambda: r.worker.ledger()["requests_waiting"] == 2)
        runner.go_on(3 + 1)
        await made.arrive(2)
        runner.go_on(1)
        await made.arrive(4)
        assert made.holds(A, short) == [[True] * 10] * 2
        assert made.holds(B, long) == [[False] * 30] * 2
        runner.go_on(1)
        # Four blocks of the long one, now that its first chunk is computed.
        await made.arrive(4 + 4)
        assert made.holds(B, long) == [[True] * 16 + [False] * 14] * 2
        runner.go_on(3)
        await until(r.nothing)
        assert made.holds(B, long) == [[True] * 30] * 2
