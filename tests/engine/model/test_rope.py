"""Rotary embeddings against transformers' own modules, the published formulas and fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from baton.rope_config import RopeConfig, max_model_len, rope_steps, ropes_of
from engine.batch_builder import Chunk, build_batch
from engine.model.rope import Rope
from tests.engine.tiny_models import Reference, load_runner, make_request

CPU = torch.device("cpu")
POSITIONS = (*range(301), 4095, 15962, 32767, 131071)
LENGTH = 131_072


def longrope(head_dim: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": 4096,
        "short_factor": [1 + 0.01 * index for index in range(head_dim // 2)],
        "long_factor": [1 + 0.4 * index for index in range(head_dim // 2)],
    }


# Parameters, and max_position_embeddings such that 131,072 tokens fit.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({"rope_type": "default"}, LENGTH),
    "linear": ({"rope_type": "linear", "factor": 4.0}, LENGTH // 4),
    "dynamic": ({"rope_type": "dynamic", "factor": 8.0}, LENGTH // 8),
    "yarn": ({"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}, LENGTH),
    "yarn without rounding": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "truncate": False,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
        },
        LENGTH,
    ),
    "yarn by its lengths": (
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8192},
        LENGTH,
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        LENGTH,
    ),
    "longrope": ({}, LENGTH),
}


def llama(parameters: dict[str, Any], length: int, head_dim: int, theta: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=length,
        rope_parameters=parameters | {"rope_theta": theta},
    )


def assert_rows_are(rope: Rope, step: int, positions: list[int], expected: tuple[torch.Tensor, ...]) -> None:
    half = expected[0].shape[-1] // 2
    cos, sin = rope.rows(torch.tensor(positions), torch.full((len(positions),), step))
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos[:, 0], expected[0][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:, 0, half:], expected[1][0][:, half:], rtol=0, atol=1e-6)
    torch.testing.assert_close(-sin[:, 0, :half], expected[1][0][:, :half], rtol=0, atol=1e-6)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("name", CASES)
def test_rows_equal_those_of_transformers(name: str, theta: float, head_dim: int) -> None:
    parameters, length = CASES[name]
    config = llama(parameters or longrope(head_dim), length, head_dim, theta)
    rope_config = ropes_of(config.to_dict())["full_attention"]
    steps = rope_steps([rope_config], LENGTH)
    rope = Rope(rope_config, head_dim, steps, CPU)
    assert max_model_len(config.to_dict()) == LENGTH
    for step, longest in enumerate(steps or (LENGTH,)):
        # transformers takes its scale from the highest position it is asked for.
        positions = [*(position for position in POSITIONS if position < longest - 1), longest - 1]
        expected = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([positions]))
        assert_rows_are(rope, step, positions, expected)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 8.0}], ids=["plain", "scaled"])
def test_both_embeddings_of_a_model_with_two_are_those_of_transformers(scaling: Any) -> None:
    spelled = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling}
    config = Gemma3TextConfig(head_dim=80, num_hidden_layers=6, max_position_embeddings=LENGTH, **spelled)
    theirs = Gemma3RotaryEmbedding(config)
    for written in (config.to_dict(), spelled):
        ropes = ropes_of(written, default_theta=1e6, local_theta=1e4)
        assert list(ropes) == ["full_attention", "sliding_attention"]
        for layer_type, rope in ropes.items():
            expected = theirs(torch.zeros(1), torch.tensor([POSITIONS]), layer_type)
            assert_rows_are(Rope(rope, 80, (), CPU), 0, list(POSITIONS), expected)


def test_the_base_of_dynamic_scaling_follows_the_length() -> None:
    original, factor, dim = 2048, 2.0, 64
    lengths = (1024, 2048, 2049, 3072, 4096, 8192)
    by_hand = [10000.0 * (factor * max(n, original) / original - (factor - 1)) ** (dim / 62) for n in lengths]
    assert by_hand == pytest.approx([10000, 10000, 10010.08, 20452.23, 31082.24, 74534.83], abs=0.005)

    config = RopeConfig(rope_type="dynamic", factor=factor, original_length=original)
    frequencies = Rope(config, dim, lengths, CPU).frequencies

    # The lowest frequency is base ** -(62 / 64); the highest is 1 for every base.
    found = frequencies[:, -1].double() ** (-dim / 62)
    assert found.tolist() == pytest.approx(by_hand, rel=1e-6)
    assert frequencies[:, 0].tolist() == [1.0] * len(lengths)


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("parameters", "multiplier"),
    [
        ({"factor": 16.0}, 1.27726),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 64.0, "attention_factor": 1.0}, 1.0),
        ({"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"factor": 16.0, "mscale": 1.0}, 1.27726),
    ],
    ids=["factor alone", "both mscales", "explicit", "both mscales 0.707", "one mscale"],
)
def test_the_attention_factor_of_yarn(parameters: dict[str, Any], multiplier: float) -> None:
    factor = parameters["factor"]
    config = llama(YARN | parameters, int(4096 * factor), 64, 1e4)
    rope = Rope(ropes_of(config.to_dict())["full_attention"], 64, (), CPU)

    cos, _ = rope.rows(torch.zeros(1, dtype=torch.int64), None)

    assert cos.flatten().tolist() == pytest.approx([multiplier] * 64, abs=5e-6)
    positions = [*range(300), 4096, int(4096 * factor) - 1]
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([positions]))
    assert_rows_are(rope, 0, positions, expected)
    # 4096 times the factor already: not scaled a second time.
    assert max_model_len(config.to_dict()) == 4096 * factor


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_rows_stay_close_to_fp64_and_keep_neighbors_apart(theta: float) -> None:
    # A bfloat16 position would make 256 of 257, 4096 of 4095 and 15936 of 15962.
    positions = [255, 256, 257, 258, 259, 260, 4095, 4096, 15936, 15962, LENGTH - 1]
    rope = Rope(RopeConfig(theta=theta), 128, (), CPU)

    cos, sin = rope.rows(torch.tensor(positions), None)

    for row, position in enumerate(positions):
        angles = [position * theta ** (-2 * index / 128) for index in range(64)]
        exact_cos, exact_sin = [math.cos(a) for a in angles], [math.sin(a) for a in angles]
        assert cos[row, 0, :64].tolist() == pytest.approx(exact_cos, abs=1e-2)
        assert sin[row, 0, 64:].tolist() == pytest.approx(exact_sin, abs=1e-2)
    for one, other in ((1, 2), (6, 7), (8, 9)):
        assert (cos[one] - cos[other]).abs().max() > 0.1


def test_a_bfloat16_model_has_the_same_rows(reference_model: Reference) -> None:
    folder, _ = reference_model()
    tokens = [1 + index % 90 for index in range(150)]
    batch = build_batch(1, [Chunk.of(make_request(tokens, block_ids=list(range(38))), 150)], 4)
    fp32, bf16 = (
        load_runner(folder, dtype=dtype).model.prepare(batch, 4).angles[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    for ours, theirs in zip(bf16, fp32, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)


def test_each_token_has_the_scale_of_its_step() -> None:
    config = RopeConfig(rope_type="dynamic", factor=4.0, original_length=32)
    rope = Rope(config, 16, (32, 64, 128), CPU)
    positions, steps = torch.tensor([31, 31, 31, 5]), torch.tensor([0, 1, 2, 1])
    cos, sin = rope.rows(positions, steps)
    for row, (position, step) in enumerate(zip(positions, steps, strict=True)):
        alone_cos, alone_sin = rope.rows(position[None], step[None])
        assert torch.equal(cos[row], alone_cos[0])
        assert torch.equal(sin[row], alone_sin[0])
    assert not torch.equal(cos[0], cos[1])
    assert torch.equal(rope.rows(positions, None)[0], rope.rows(positions, steps * 0)[0])


def test_an_embedding_that_does_not_scale_ignores_the_steps_of_another() -> None:
    rope = Rope(RopeConfig(), 16, (32, 64), CPU)
    positions = torch.arange(40)
    assert torch.equal(rope.rows(positions, torch.ones(40).long())[0], rope.rows(positions, None)[0])


def test_longrope_takes_its_long_factors_beyond_the_original_length_only() -> None:
    config = ropes_of(llama(longrope(64), LENGTH, 64, 1e4).to_dict())["full_attention"]
    rope = Rope(config, 64, (4096, LENGTH), CPU)
    plain = torch.tensor([10000.0 ** (-2 * index / 64) for index in range(32)])
    for step, factors in enumerate((config.short_factors, config.long_factors)):
        torch.testing.assert_close(rope.frequencies[step], plain / torch.tensor(factors), rtol=1e-5, atol=0)
    # sqrt(1 + ln(32) / ln(4096))
    assert config.attention_factor == pytest.approx(1.190238, abs=1e-6)
