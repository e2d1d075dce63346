from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.load import load_engine
from engine.model.layer import Mlp, Projection
from engine.model.packed import packed, suits_packing
from engine.runner import ModelRunner
from tests.engine.tiny_models import AWKWARD, logits_of, make_request, reference_logits

torch.set_num_threads(1)

needs_bf16 = pytest.mark.skipif(
    not suits_packing(torch.device("cpu"), torch.bfloat16), reason="this CPU does not compute bfloat16"
)
TOKENS = [7, 3, 100, 41, 41, 8, 99, 0, 63, 12, 5]


def test_only_bfloat16_on_a_cpu_is_packed() -> None:
    assert not suits_packing(torch.device("cpu"), torch.float32)
    assert not suits_packing(torch.device("cpu"), torch.float16)
    assert not suits_packing(torch.device("cuda"), torch.bfloat16)


@needs_bf16
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 31, 200])
@pytest.mark.parametrize(("out_size", "in_size"), [(96, 64), (97, 45), (1, 3), (515, 576)])
def test_a_product_is_the_exact_one_rounded(
    out_size: int, in_size: int, num_tokens: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(out_size + num_tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    weight, x = random(out_size, in_size), random(num_tokens, in_size)
    bias = random(out_size) if has_bias else None
    product = Projection(weight=packed(weight), bias=bias)(x)

    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ weight.double().abs().T + 1
    # Half a step of bfloat16, and sums in fp32 in whatever order.
    bound = exact.abs() * 2.0**-8 + magnitude * in_size * 2.0**-24
    assert product.dtype == torch.bfloat16
    assert product.shape == (num_tokens, out_size)
    assert bool(((product.double() - exact).abs() <= bound).all())


@needs_bf16
def test_rows_that_are_not_next_to_each_other_are_taken() -> None:
    wide = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    projection = Projection(weight=packed(torch.eye(64).bfloat16()))
    assert torch.equal(projection(wide[:, ::2]), wide[:, ::2])
    assert torch.equal(projection(wide[:, 64:]), wide[:, 64:])


@pytest.fixture
def model(tmp_path: Path) -> LlamaForCausalLM:
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**(AWKWARD | {"initializer_range": 0.2}))).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    return model


def engine(folder: Path, dtype: str, kernels: str = "auto") -> ModelRunner:
    config = EngineConfig(
        model=str(folder), dtype=dtype, kernels=kernels, kv_cache_bytes=1 << 19, block_size=4
    )
    return load_engine(config)


def is_packed(runner: ModelRunner) -> set[bool]:
    """Of every product's weights."""
    products = [runner.model._head]
    for layer in runner.model.weights.layers:
        assert isinstance(layer.mlp, Mlp)
        products += [layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down]
    return {product.weight.is_mkldnn for product in products}


@needs_bf16
def test_an_engine_packs_and_its_logits_are_transformers(model: LlamaForCausalLM, tmp_path: Path) -> None:
    # In plain torch otherwise: tests/engine/cpu has the kernels.
    runner = engine(tmp_path, "bfloat16", kernels="torch")
    assert is_packed(runner) == {True}
    (logits,) = logits_of(runner, [(make_request(TOKENS, block_ids=[0, 1, 2]), len(TOKENS))])
    expected = reference_logits(model, TOKENS)
    # As tests/engine/model/test_precision.py measures what bfloat16 costs.
    assert float((logits - expected).abs().max() / expected.std()) < 0.1


def test_fp32_and_kernels_read_rows(model: LlamaForCausalLM, tmp_path: Path) -> None:
    assert is_packed(engine(tmp_path, "float32")) == {False}
    assert is_packed(engine(tmp_path, "bfloat16", "triton")) == {False}
