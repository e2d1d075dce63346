"""The tattle-tale's rule against a reference of its own, and that no wrong value in a cache escapes it."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.architectures import find_architecture
from baton.errors import ModelError
from baton.models import ModelDir
from baton.sampling import SamplingParams
from engine.batch_builder import Chunk, build_batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import RequestFailed
from engine.kv_cache import CacheShape, KVCache
from engine.model.tattletale import TattleTaleRunner
from engine.request import Request
from engine.stored import DONE
from tests.engine.tiny_models import make_request
from tests.tiny_tattletale import KV_SHAPE, write_tattletale

# Large enough that no two contexts of a test share a token by chance.
VOCAB = 1 << 32
L, K, H = 2, 3, 5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values_of(token_ids: Sequence[int], size: int) -> list[list[int]]:
    """KV of each token by the rule's words: 16 values without zero, hashed from the row before."""
    rows: list[list[int]] = []
    for position, token_id in enumerate(token_ids):
        before = bytes(value & 0xFF for value in rows[-1]) if rows else b""
        key = before + token_id.to_bytes(8, "little") + position.to_bytes(8, "little")
        small = [byte % 16 - 8 for byte in hashlib.shake_128(key).digest(size)]
        rows.append([value if value < 0 else value + 1 for value in small])
    return rows


def token_after(token_ids: Sequence[int], seed: int, shape: tuple[int, ...], vocab_size: int) -> int:
    """The next token by the rule's words, with plain loops over layer, K or V, head, token, dim."""
    layers, two, heads, dims = shape
    rows = values_of(token_ids, layers * two * heads * dims)
    logical = [
        row[((layer * two + part) * heads + head) * dims + dim] & 0xFF
        for layer in range(layers)
        for part in range(two)
        for head in range(heads)
        for row in rows
        for dim in range(dims)
    ]
    key = len(token_ids).to_bytes(8, "little") + seed.to_bytes(8, "little")
    return zlib.crc32(key + bytes(logical)) % vocab_size


class Rig:
    """One runner over a small cache, fed with chunks."""

    def __init__(
        self, *, block_size: int = 4, layout: str = "HND", dtype: torch.dtype = torch.float32
    ) -> None:
        shape = CacheShape(
            num_blocks=40,
            num_layers=L,
            num_kv_heads=K,
            block_size=block_size,
            head_dim=H,
            dtype=dtype,
            layout=layout,
        )
        self.cache = KVCache(shape)
        self.runner = TattleTaleRunner(self.cache, VOCAB)

    def compute(self, *chunks: tuple[Request, int]) -> list[int]:
        batch = build_batch(1, [Chunk.of(r, count) for r, count in chunks], self.cache.shape.block_size)
        token_ids = [int(token) for token in self.runner.run(batch).token_ids]
        for request, count in chunks:
            request.num_computed_tokens += count
        return token_ids

    def places(self, request: Request) -> list[tuple[int, int]]:
        size = self.cache.shape.block_size
        return [(request.block_ids[i // size], i % size) for i in range(request.num_tokens)]


def test_layers_are_stored_one_after_another_and_a_watched_run_tells_of_each() -> None:
    rig, watched, told = Rig(), Rig(), list[tuple[int, object]]()
    request = prompt_of(5, 6, 7)
    batch = build_batch(1, [Chunk.of(request, 3)], 4)
    expected = torch.tensor(values_of([5, 6, 7], L * 2 * K * H)).float().view(3, L, 2, K, H)
    blocks, offsets = (torch.tensor(indices) for indices in zip(*rig.places(request), strict=True))

    for num_layers in rig.runner.store_layers(batch):
        found = rig.cache.logical[blocks, :, :, :, offsets]
        assert torch.equal(found[:, :num_layers], expected[:, :num_layers])
        assert not found[:, num_layers:].any()
    output = watched.runner.run(batch, lambda *news: told.append(news))

    assert num_layers == L
    assert told == [(1, DONE), (2, DONE)]
    assert output.token_ids.tolist() == [token_after([5, 6, 7], 0, (L, 2, K, H), VOCAB)]
    assert rig.runner.sample(batch).token_ids.tolist() == output.token_ids.tolist()


def prompt_of(*token_ids: int, number: int = 0, **params: Any) -> Request:
    """A request whose blocks lie in no order, apart from those of another number."""
    request = make_request(
        token_ids, number=number, params=SamplingParams(**({"temperature": 0, "max_tokens": 8} | params))
    )
    request.block_ids = [7 + 20 * number, 2 + 20 * number, *range(10 + 20 * number, 19 + 20 * number)]
    return request


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_tokens_are_the_rules_for_every_layout_dtype_and_block_size(
    layout: str, dtype: torch.dtype, block_size: int
) -> None:
    rig = Rig(layout=layout, dtype=dtype, block_size=block_size)
    one, other = prompt_of(5, 6, 7, 8, 9), prompt_of(5, 6, number=1, temperature=1.0, seed=2**64 - 1)
    assert rig.compute((one, 2), (other, 2)) == [token_after([5, 6], 2**64 - 1, (L, 2, K, H), VOCAB)]
    expected = token_after([5, 6, 7, 8, 9], 0, (L, 2, K, H), VOCAB)
    assert rig.compute((one, 3)) == [expected]
    one.token_ids.append(11)
    assert rig.compute((one, 1)) == [token_after([5, 6, 7, 8, 9, 11], 0, (L, 2, K, H), VOCAB)]


def test_a_seed_changes_a_drawn_token_and_no_greedy_one() -> None:
    tokens = {
        (temperature, seed): Rig().compute((prompt_of(1, 2, temperature=temperature, seed=seed), 2))[0]
        for temperature in (0.0, 1.0)
        for seed in (3, 4)
    }
    assert tokens[0.0, 3] == tokens[0.0, 4] != tokens[1.0, 3] != tokens[1.0, 4]


@st.composite
def wrongs(draw: st.DrawFn) -> tuple[str, int, int, tuple[int, ...]]:
    """(what goes wrong, token, another token, which of the token's values)."""
    what = draw(st.sampled_from(["lost", "stale", "swapped", "sign", "bit", "nan", "off by one"]))
    tokens = draw(st.lists(st.integers(0, 8), min_size=2, max_size=2, unique=True))
    dims = tuple(draw(st.integers(0, size - 1)) for size in (L, 2, K, H))
    return what, tokens[0], tokens[1], dims


@settings(max_examples=100, deadline=None, derandomize=True)
@given(wrongs(), st.sampled_from(DTYPES), st.sampled_from(["HND", "NHD"]), st.sampled_from([1, 3, 4]))
def test_one_wrong_value_changes_the_very_next_token(
    wrong: tuple[str, int, int, tuple[int, ...]], dtype: torch.dtype, layout: str, block_size: int
) -> None:
    rig = Rig(layout=layout, dtype=dtype, block_size=block_size)
    request = prompt_of(*range(30, 40))
    rig.compute((request, 10))
    request.token_ids.append(40)
    what, token, other, (layer, part, head, dim) = wrong
    at, elsewhere = (
        rig.cache.logical[block, layer, part, head, offset]
        for block, offset in (rig.places(request)[token], rig.places(request)[other])
    )
    was = at.clone()
    spoil(what, at, elsewhere, dim)
    expected = token_after([*range(30, 41)], 0, (L, 2, K, H), VOCAB)
    found = rig.compute((request, 1))[0]
    # Two values may be equal by chance; all others differ bit by bit.
    assert (found == expected) is bool((at.view(torch.uint8) == was.view(torch.uint8)).all())


def spoil(what: str, at: torch.Tensor, elsewhere: torch.Tensor, dim: int) -> None:
    match what:
        case "lost":
            at[dim] = 0
        case "stale":
            at[dim] = elsewhere[dim]
        case "swapped":
            at[:], elsewhere[:] = elsewhere.clone(), at.clone()
        case "sign":
            at[dim] = -at[dim]
        case "bit":
            at.view(torch.int16 if at.dtype != torch.float32 else torch.int32)[dim] ^= 1
        case "nan":
            at[dim] = torch.nan
        case "off by one":
            at[dim] += 1


@pytest.mark.parametrize("token", range(9))
def test_a_wrong_token_in_the_prefix_changes_the_kv_of_all_after_it(token: int) -> None:
    sound, wrong = Rig(), Rig()
    sound.compute((prompt_of(*range(9)), 9))
    request = prompt_of(*(50 if index == token else index for index in range(9)))
    wrong.compute((request, 9))
    differs = [
        not torch.equal(
            sound.cache.logical[block, ..., offset, :], wrong.cache.logical[block, ..., offset, :]
        )
        for block, offset in wrong.places(request)
    ]
    assert differs == [index >= token for index in range(9)]


def test_a_cache_begins_with_values_that_no_token_has() -> None:
    assert 0 not in {value for row in values_of(range(200), 60) for value in row}
    rig, request = Rig(), prompt_of(1, 2, 3)
    request.num_computed_tokens = 2  # as if its KV had come from elsewhere
    assert rig.compute((request, 1)) != [token_after([1, 2, 3], 0, (L, 2, K, H), VOCAB)]


async def test_a_worker_serves_it_from_a_folder_without_weights(tmp_path: Path) -> None:
    vocab_size = write_tattletale(tmp_path / "tattletale")
    config = EngineConfig(kv_cache_bytes=1 << 20, block_size=4, max_running=4, kv_dtype="bfloat16")
    engine = await Engine.start(config, ModelDir.open(tmp_path / "tattletale"))
    prompt, found = [9, 8, 7, 6, 5], list[int]()
    request = make_request(prompt, params=SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.scheduler.add(request)
    while engine.scheduler.has_work:
        batch = engine.scheduler.next_batch()
        assert batch is not None
        events = engine.scheduler.apply(await engine.runner.execute(batch))
        assert not any(isinstance(event, RequestFailed) for event in events)
    await engine.close()
    while len(found) < 4:
        found.append(token_after(prompt + found, 0, KV_SHAPE, vocab_size))
    assert request.token_ids == prompt + found


def test_it_is_never_offered_as_a_model() -> None:
    with pytest.raises(ModelError) as raised:
        find_architecture(["NobodyForCausalLM"])
    assert "TattleTale" not in raised.value.message
