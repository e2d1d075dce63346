"""What half-precision caches and weights cost: bounds from the formats, and from measurements with a margin.

The bounds on logits are twice the largest of 20 seeds, of which the first ones run here. Logits are compared
with transformers' in fp32, in units of the standard deviation of those.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from engine.config import EngineConfig
from engine.load import load_engine
from engine.runner import ModelRunner
from tests.engine.tiny_models import AWKWARD, logits_of, make_request, reference_logits

torch.set_num_threads(1)

NUM_SEEDS = 4
NUM_PROMPT, NUM_TOKENS, CHUNK = 60, 72, 20
BLOCKS = list(range(18))
# A rounded value is off by at most half a step, and a step is 2^-7 (bfloat16) or 2^-10 (float16) of the power
# of two below it. Below 2^-14 the steps of float16 are 2^-24; bfloat16 has the exponents of float32.
RELATIVE = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
ABSOLUTE = {"bfloat16": 2.0**-134, "float16": 2.0**-25}


@dataclass(frozen=True)
class Sample:
    """A random model, a random sequence, and transformers' fp32 logits at all its positions."""

    folder: Path
    token_ids: list[int]
    logits: torch.Tensor


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    return [sample(tmp_path_factory.mktemp("model"), seed) for seed in range(NUM_SEEDS)]


def sample(folder: Path, seed: int) -> Sample:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(AWKWARD | {"initializer_range": 0.2}))).eval()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    token_ids = sample_tokens(seed)
    return Sample(folder, token_ids, reference_logits(model, token_ids))


def sample_tokens(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(101) for _ in range(NUM_TOKENS)]


def engine(sample: Sample, dtype: str, kv_dtype: str, kernels: str = "auto") -> ModelRunner:
    config = EngineConfig(
        model=str(sample.folder),
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=4,
        kv_cache_bytes=1 << 19,
        kernels=kernels,
    )
    return load_engine(config)


def handed_over(
    sample: Sample, dtype: str, prefill_kv: str, decode_kv: str, kernels: str = "auto"
) -> torch.Tensor:
    """Logits at all positions: a prompt in chunks on one engine, the rest token by token on another."""
    prefill = engine(sample, dtype, prefill_kv, kernels)
    decode = engine(sample, dtype, decode_kv, kernels)
    request = make_request(sample.token_ids[:NUM_PROMPT], block_ids=BLOCKS)
    logits = []
    while request.num_pending_tokens:
        logits += logits_of(prefill, [(request, min(CHUNK, request.num_pending_tokens))])
    decode.cache.data[BLOCKS] = prefill.cache.data[BLOCKS].to(decode.cache.data.dtype)
    for token_id in sample.token_ids[NUM_PROMPT:]:
        request.token_ids.append(token_id)
        logits += logits_of(decode, [(request, 1)])
    return torch.cat(logits)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_cached_value_is_off_by_half_a_step_of_its_format(
    samples: list[Sample], kv_dtype: str, layout: str
) -> None:
    # Of the first layer, whose input no cache has touched.
    stored = {}
    for name in ("float32", kv_dtype):
        config = EngineConfig(
            model=str(samples[0].folder), kv_dtype=name, block_size=4, kv_cache_bytes=1 << 19, layout=layout
        )
        runner = load_engine(config)
        logits_of(runner, [(make_request(samples[0].token_ids, block_ids=BLOCKS), NUM_TOKENS)])
        assert runner.cache.data.dtype is getattr(torch, name)
        stored[name] = runner.cache.layer(0)[BLOCKS].double()

    exact, rounded = stored["float32"], stored[kv_dtype]
    assert ((rounded - exact).abs() <= exact.abs() * RELATIVE[kv_dtype] + ABSOLUTE[kv_dtype]).all()
    assert not torch.equal(rounded, exact)


@pytest.mark.parametrize(
    ("dtypes", "most", "rms"),
    [
        (("float32", "float32", "float32"), 1e-4, 1e-5),
        (("float32", "float32", "bfloat16"), 0.20, 0.0092),
        (("float32", "float32", "float16"), 0.015, 0.0011),
        (("float32", "bfloat16", "bfloat16"), 0.23, 0.0155),
        (("float32", "float16", "float16"), 0.020, 0.0019),
        (("bfloat16", "bfloat16", "bfloat16"), 0.68, 0.063),
        (("float16", "float16", "float16"), 0.087, 0.0086),
        (("float16", "float16", "bfloat16"), 0.12, 0.0113),
    ],
    ids=str,
)
def test_logits_stay_within_twice_what_was_measured(
    samples: list[Sample], dtypes: tuple[str, str, str], most: float, rms: float
) -> None:
    """dtypes: of weights, of the prefill cache, of the decode cache."""
    for each in samples:
        computed = handed_over(each, *dtypes)
        error = (computed - each.logits) / each.logits.std()
        assert error.abs().max() < most
        assert error.square().mean().sqrt() < rms


@pytest.mark.parametrize("decode_kv", ["float32", "float16"])
def test_with_bfloat16_weights_a_wider_cache_changes_nothing(samples: list[Sample], decode_kv: str) -> None:
    # Keys and values are bfloat16 when they are computed. float32 holds each of them; float16 all between
    # 2^-17 and 65504, and smaller ones to 2^-25. That is why auto is the weights' type on both sides.
    # Of the same operators: kernels for CPUs take a cache of the weights' type only.
    same = handed_over(samples[0], "bfloat16", "bfloat16", "bfloat16", kernels="torch")
    wider = handed_over(samples[0], "bfloat16", "bfloat16", decode_kv, kernels="torch")

    torch.testing.assert_close(wider, same, rtol=0.0, atol=0.0 if decode_kv == "float32" else 1e-3)


@pytest.mark.parametrize(
    ("dtype", "bias"),
    [("bfloat16", 0), ("bfloat16", 64), ("float16", 64), ("float16", 200), ("float16", 700)],
)
def test_biases_that_lift_all_scores_cost_no_more_than_in_a_fused_operator(
    tmp_path: Path, dtype: str, bias: int
) -> None:
    # As in Qwen2 and Qwen2.5: scores are 1024, 10,000 or 122,500 more than without, nearly alike for all
    # keys. At 1024 the steps of bfloat16 are 8 and those of float16 1; at 10,000 these are 8, and 122,500 is
    # infinite.
    half = getattr(torch, dtype)
    save_biased(tmp_path, bias, half)
    exact, fused = (hugging_face(tmp_path, each) for each in (torch.float32, half))
    token_ids = sample_tokens(0)
    wanted = reference_logits(exact, token_ids)
    spread = wanted.std()
    of_fused = (reference_logits(fused, token_ids).float() - wanted).square().mean().sqrt() / spread

    computed = handed_over(Sample(tmp_path, token_ids, wanted), dtype, dtype, dtype)

    error = (computed - wanted).square().mean().sqrt() / spread
    # Measured: 0.0014 to 0.0116, between 0.88 and 1.11 times the fused operator's.
    assert error < 1.5 * of_fused < 0.02


def save_biased(folder: Path, bias: int, dtype: torch.dtype) -> None:
    """A Qwen2 with this bias on the slowest dimensions of all queries and keys, which positions hardly turn.

    dtype: of which all weights are numbers.
    """
    torch.manual_seed(1)
    settings = {
        "hidden_size": 192,
        "head_dim": 64,
        "initializer_range": 0.08,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    model = Qwen2ForCausalLM(Qwen2Config(**(AWKWARD | settings)))
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                for dim in (30, 31):
                    projection.bias[dim::64] = bias
                    projection.weight[dim::64] = 0
    model.to(dtype).float().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def hugging_face(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    )
    return model
