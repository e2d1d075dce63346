"""A step tells which layers store its KV neither too early nor too late, and is not changed by that."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.batch import ForwardBatch
from engine.batch_builder import Chunk, build_batch
from engine.request import Request
from engine.runner import ModelRunner
from engine.stored import DONE, Stored
from engine.thread import EngineThread
from tests.engine.tiny_models import Reference, load_runner, make_request

NUM_LAYERS, BLOCK_SIZE = 3, 4
NUM_STEPS = 100


def kv_of(runner: ModelRunner, batch: ForwardBatch, layers: slice) -> torch.Tensor:
    """A copy of what the cache has of the batch's tokens in some layers: [T, layers, 2, K, h]."""
    blocks, offsets = (torch.from_numpy(array) for array in divmod(batch.slot_mapping, BLOCK_SIZE))
    return runner.cache.logical[blocks, :, :, :, offsets][:, layers].clone()


def batches(rng: random.Random) -> Iterator[ForwardBatch]:
    """Steps of whole prompts, chunks and single tokens, each slot of the cache written once."""
    free = rng.sample(range(400), 400)
    requests: list[Request] = []
    for step_id in range(NUM_STEPS):
        requests = [request for request in requests if request.num_pending_tokens]
        while len(requests) < 2 or (len(requests) < 4 and rng.random() < 0.3):
            tokens = [rng.randrange(101) for _ in range(rng.randint(1, 24))]
            blocks = [free.pop() for _ in range(-(-len(tokens) // BLOCK_SIZE))]
            requests.append(make_request(tokens, number=len(free), block_ids=blocks))
        chunks = [Chunk.of(r, rng.randint(1, min(7, r.num_pending_tokens))) for r in requests]
        yield build_batch(step_id, chunks, BLOCK_SIZE)
        for chunk in chunks:
            chunk.request.num_computed_tokens += chunk.num_tokens


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_what_is_there_at_each_layers_time_is_what_is_there_at_the_end(
    reference_model: Reference, layout: str
) -> None:
    folder, _ = reference_model()
    runner = load_runner(folder, layout=layout, num_blocks=400)
    unwatched = load_runner(folder, layout=layout, num_blocks=400)
    for batch in batches(random.Random(5)):
        seen: list[torch.Tensor] = []

        def look(num_layers: int, stored: object, batch: ForwardBatch = batch, seen: Any = seen) -> None:
            assert (num_layers, stored) == (len(seen) + 1, DONE)
            seen.append(kv_of(runner, batch, slice(num_layers)))
            # Of the next layer nothing is there yet: the cache is NaN where nobody wrote.
            assert bool(kv_of(runner, batch, slice(num_layers, None)).isnan().all())

        output = runner.run(batch, look)

        final = kv_of(runner, batch, slice(None))
        assert not bool(final.isnan().any())
        assert len(seen) == NUM_LAYERS
        for num_layers, kv in enumerate(seen, start=1):
            assert torch.equal(kv, final[:, :num_layers])
        assert output.token_ids.tolist() == unwatched.run(batch).token_ids.tolist()
    assert torch.equal(runner.cache.data.nan_to_num(), unwatched.cache.data.nan_to_num())


async def test_what_the_event_loop_reads_while_steps_run_is_final(reference_model: Reference) -> None:
    folder, _ = reference_model()
    engine = await EngineThread.start(lambda: load_runner(folder, num_blocks=400))
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    for batch in batches(random.Random(6)):
        seen: dict[int, torch.Tensor] = {}

        def look(num_layers: int, _stored: object, batch: ForwardBatch = batch, seen: Any = seen) -> None:
            seen[num_layers] = kv_of(runner, batch, slice(num_layers))

        await engine.execute(batch, look)

        final = kv_of(runner, batch, slice(None))
        assert list(seen) == sorted(seen)
        assert max(seen) == NUM_LAYERS
        for num_layers, kv in seen.items():
            assert torch.equal(kv, final[:, :num_layers])
    await engine.close()


def test_the_layers_of_a_chunked_prompt_are_those_of_transformers(reference_model: Reference) -> None:
    folder, reference = reference_model()
    runner = load_runner(folder)
    prompt = [(7 * index) % 101 for index in range(23)]
    request = make_request(prompt, block_ids=[9, 2, 7, 1, 5, 8])
    parts: list[list[torch.Tensor]] = [[] for _ in range(NUM_LAYERS)]
    for count in (9, 13, 1):
        batch = build_batch(1, [Chunk.of(request, count)], BLOCK_SIZE)

        def look(num_layers: int, _stored: object, batch: ForwardBatch = batch) -> None:
            parts[num_layers - 1].append(kv_of(runner, batch, slice(num_layers - 1, num_layers))[:, 0])

        runner.run(batch, look)
        request.num_computed_tokens += count

    with torch.no_grad():
        expected = reference(torch.tensor([prompt]), use_cache=True).past_key_values
    for layer, kv in zip(expected.layers, parts, strict=True):
        kv_2TKh = torch.cat(kv).transpose(0, 1)
        torch.testing.assert_close(kv_2TKh[0], layer.keys[0].transpose(0, 1), rtol=0, atol=1e-4)
        torch.testing.assert_close(kv_2TKh[1], layer.values[0].transpose(0, 1), rtol=0, atol=1e-4)


def test_an_error_in_the_callback_ends_the_step(reference_model: Reference) -> None:
    def fail(num_layers: int, _stored: object) -> None:
        told.append(num_layers)
        raise RuntimeError("device lost")

    told: list[int] = []
    folder, _ = reference_model()
    runner = load_runner(folder)
    batch = build_batch(1, [Chunk.of(make_request([1, 2, 3], block_ids=[0]), 3)], BLOCK_SIZE)
    with pytest.raises(RuntimeError, match="device lost"):
        runner.run(batch, fail)
    assert told == [1]


class FakeStream:
    """A stream of a device that is not there: notes how many layers were stored when it was asked."""

    def __init__(self, runner: ModelRunner, batch: ForwardBatch) -> None:
        self._runner = runner
        self._batch = batch
        self.num_layers_at_events: list[int] = []
        self.num_waits = 0

    def record_event(self) -> int:
        is_stored = ~kv_of(self._runner, self._batch, slice(None)).isnan().flatten(2).any(dim=2).any(dim=0)
        self.num_layers_at_events.append(int(is_stored.sum()))
        return len(self.num_layers_at_events)

    def synchronize(self) -> None:
        self.num_waits += 1


@pytest.mark.parametrize(("count", "num_waits"), [(5, 1), (6, 0)], ids=["a chunk", "the last chunk"])
def test_on_a_gpu_each_layer_has_its_event_and_a_step_without_samples_waits(
    reference_model: Reference, monkeypatch: pytest.MonkeyPatch, count: int, num_waits: int
) -> None:
    folder, _ = reference_model()
    runner = load_runner(folder)
    batch = build_batch(1, [Chunk.of(make_request(list(range(6)), block_ids=[4, 1]), count)], BLOCK_SIZE)
    stream, told = FakeStream(runner, batch), list[tuple[int, Any]]()
    runner.cache.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    runner.run(batch, lambda *news: told.append(news))

    assert told == [(1, Stored(1)), (2, Stored(2)), (3, Stored(3))]  # type: ignore[arg-type]
    assert stream.num_layers_at_events == [1, 2, 3]
    assert stream.num_waits == num_waits
    runner.run(batch)
    assert len(stream.num_layers_at_events) == NUM_LAYERS
