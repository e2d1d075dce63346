"""float16 at the end of its range: what is computed in fp32 stays right, what is not fails by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton.errors import NonFiniteLogits
from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.load import load_engine
from engine.loop import EngineLoop
from engine.model.layers import rms_norm
from tests.engine.tiny_models import AWKWARD, logits_of, make_request

torch.set_num_threads(1)

FLOAT16_MAX = 65504.0
PROMPT = list(range(20, 50))
BLOCKS = list(range(12))


def large_model(folder: Path, **largest: float) -> LlamaForCausalLM:
    """A model of fp16 weights; the named ones are scaled to that largest absolute value."""
    torch.manual_seed(4)
    config = LlamaConfig(**(AWKWARD | {"initializer_range": 0.2, "tie_word_embeddings": False}))
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for part, most in largest.items():
                if part in name:
                    parameter.mul_(most / parameter.abs().max())
            parameter.copy_(parameter.half().float())
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


def config_of(folder: Path, dtype: str = "float16", **settings: str) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        dtype=dtype,
        block_size=4,
        kv_cache_bytes=1 << 19,
        chunk_tokens=8,
        max_running=4,
        **settings,
    )


def greedy(config: EngineConfig, prompt: list[int] = PROMPT, max_tokens: int = 4) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    (tokens,) = EngineLoop(load_engine(config), config).generate([prompt], params)
    return tokens


def test_the_squares_of_a_wide_row_are_summed_in_fp32() -> None:
    # 4096 * 5 * 5 is 102400, beyond float16.
    hidden = torch.full((2, 4096), 5.0, dtype=torch.float16)
    normed = rms_norm(hidden.float(), torch.ones(4096), 1e-6).half()
    assert (normed - 1.0).abs().max() <= 1e-3


def test_a_residual_stream_beyond_float16_keeps_its_logits(tmp_path: Path) -> None:
    model = large_model(tmp_path, embed_tokens=60_000.0, o_proj=4_000.0, down_proj=2_000.0)
    with torch.no_grad():
        reference = model(torch.tensor([PROMPT]), output_hidden_states=True)
    assert max(hidden.abs().max() for hidden in reference.hidden_states[:-1]) > 70_000

    request = make_request(PROMPT, block_ids=BLOCKS)
    logits = torch.cat(logits_of(load_engine(config_of(tmp_path)), [(request, len(PROMPT))]))

    # Measured: 0.0044 of the spread of the logits.
    error = (logits - reference.logits[0]).abs().max() / reference.logits[0].std()
    assert error < 0.02
    assert torch.equal(logits.argmax(dim=-1), reference.logits[0].argmax(dim=-1))


@pytest.mark.parametrize(
    "largest",
    [{"down_proj": 60_000.0}, {"o_proj": 60_000.0}, {"gate_proj": 300.0, "up_proj": 300.0}],
    ids=["MLP output", "attention output", "gate times up"],
)
def test_a_product_beyond_float16_ends_the_request_by_name(tmp_path: Path, largest: dict[str, float]) -> None:
    large_model(tmp_path, **largest)

    with pytest.raises(NonFiniteLogits):
        greedy(config_of(tmp_path))
    assert len(greedy(config_of(tmp_path, "float32"))) == 4


def test_scores_beyond_float16_end_the_request_by_name(tmp_path: Path) -> None:
    # Queries and keys fit, at some 2000; 20 products of them, divided by sqrt(20), do not.
    large_model(tmp_path, q_proj=1_000.0, k_proj=1_000.0)

    with pytest.raises(NonFiniteLogits):
        greedy(config_of(tmp_path))
    assert len(greedy(config_of(tmp_path, "float32"))) == 4


@pytest.mark.parametrize("part", ["k_proj", "v_proj"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_beyond_a_float16_cache_is_its_largest_number(tmp_path: Path, part: str, dtype: str) -> None:
    large_model(tmp_path, **{part: 60_000.0})
    runner = load_engine(config_of(tmp_path, dtype, kv_dtype="float16"))
    request = make_request(PROMPT, block_ids=BLOCKS)

    # The second chunk and the decode step read what the first has stored.
    logits = [part for count in (20, 9, 1) for part in logits_of(runner, [(request, count)])]

    stored = runner.cache.data[BLOCKS]
    assert stored.abs().max() == FLOAT16_MAX
    assert torch.cat(logits).isfinite().all()


def test_a_key_of_minus_infinity_is_not_ignored(tmp_path: Path) -> None:
    # Of the slowest pair of dimensions, which rotation hardly turns: every query is positive there, and the
    # key of a single token is below float16's range. Its scores are minus infinity, as if it were masked.
    torch.manual_seed(4)
    config = LlamaConfig(**(AWKWARD | {"initializer_range": 0.2, "attention_bias": True}))
    model = LlamaForCausalLM(config).eval()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for dim in (9, 19):
            attention.q_proj.weight[dim::20] = 0
            attention.q_proj.bias[dim::20] = 0.01
        attention.k_proj.weight[19] = 0
        keys = model.model.layers[0].input_layernorm(model.model.embed_tokens.weight)
        keys = keys @ attention.k_proj.weight[9]
        extreme = int(keys.abs().argmax())
        attention.k_proj.weight[9] *= -80_000.0 / keys[extreme]
    ordinary = (keys.abs() < keys.abs().max() / 2).nonzero()[:, 0].tolist()
    prompt = [*ordinary[:5], extreme, *ordinary[5:20]]
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(NonFiniteLogits):
        greedy(config_of(tmp_path), prompt, 1)
    assert len(greedy(config_of(tmp_path, "float32"), prompt, 1)) == 1
