"""What half-precision models compute in fp32, or round at a certain place: one exact test of each rule.

The families' tests compare whole models with a tolerance, in which any of these would be lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from baton.model_config import ModelConfig, MoeConfig
from engine.batch_builder import Chunk, build_batch
from engine.model import layer
from engine.model.decoder import Decoder
from engine.model.forward_pass import DecoderWeights
from engine.model.layer import LayerWeights
from engine.model.moe import Experts
from engine.model.plain_pass import PlainPass
from tests.engine.families import FULL, GEMMA, Family
from tests.engine.tiny_models import load_runner, make_request, prompts_of, with_all_logits

torch.set_num_threads(1)

NUM_TOKENS = 12
# The root of 1152 is 33.941; numbers of bfloat16 are 0.25 apart there, those of float16 2^-5.
GEMMA_1152 = Family(
    kind="gemma3", settings=GEMMA | {"hidden_size": 1152, "num_hidden_layers": 1, "layer_types": [FULL]}
)
EMBEDDING_SCALE = {torch.bfloat16: 34.0, torch.float16: 33.9375}


@dataclass
class Recorder:
    """Computes layers as ever, and keeps what the first one was given and gave."""

    entering: list[torch.Tensor] = field(default_factory=list)
    heads: list[torch.Tensor] = field(default_factory=list)
    leaving: list[torch.Tensor] = field(default_factory=list)
    weights: list[LayerWeights] = field(default_factory=list)
    angles: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def project(
        self,
        hidden_TD: torch.Tensor,
        weights: LayerWeights,
        config: ModelConfig,
        cos_T1h: torch.Tensor,
        sin_T1h: torch.Tensor,
    ) -> torch.Tensor:
        heads = layer.project(hidden_TD, weights, config, cos_T1h, sin_T1h)
        self.entering.append(hidden_TD.clone())
        self.heads.append(heads.clone())
        self.weights.append(weights)
        self.angles.append((cos_T1h, sin_T1h))
        return heads

    def finish(
        self, hidden_TD: torch.Tensor, attended_TA: torch.Tensor, weights: LayerWeights, config: ModelConfig
    ) -> torch.Tensor:
        self.leaving.append(layer.finish(hidden_TD, attended_TA, weights, config))
        return self.leaving[-1]


@dataclass(frozen=True)
class Run:
    """One step of a model of one layer, whose checkpoint is fp32 and whose weights are not."""

    dtype: torch.dtype
    token_ids: list[int]
    stored: dict[str, torch.Tensor]
    config: ModelConfig
    seen: Recorder
    normed: torch.Tensor


@pytest.fixture(scope="module", params=EMBEDDING_SCALE, ids=str)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(GEMMA_1152, tmp_path_factory.mktemp("gemma"), request.param)


def run_of(family: Family, folder: Path, dtype: torch.dtype) -> Run:
    family.save(folder)
    runner = load_runner(folder, dtype=dtype)
    seen = Recorder()
    runner.model.forward_pass = PlainPass(runner.model.config, seen)
    (prompt,) = prompts_of(NUM_TOKENS)
    chunk = Chunk.of(make_request(prompt, block_ids=list(range(3))), NUM_TOKENS)
    inputs = runner.model.prepare(with_all_logits(build_batch(1, [chunk], 4)), 4)
    normed = runner.model.forward(inputs, runner.cache)
    stored = load_file(folder / "model.safetensors")
    return Run(dtype, prompt, stored, runner.model.config, seen, normed)


def assert_rounded_once(computed: torch.Tensor, exact: torch.Tensor) -> None:
    """computed: half precision, at most half a step from `exact`, but for errors of fp32."""
    # Mantissas of frexp are 0.5 to 1. Below the smallest normal number steps stay what they are there.
    _, exponents = torch.frexp(exact.abs().clamp(min=torch.finfo(computed.dtype).tiny))
    half_steps = torch.finfo(computed.dtype).eps * 2.0 ** (exponents.double() - 2)
    allowed = half_steps * 1.002 + 1e-7 * exact.abs().mean()
    assert ((computed.double() - exact).abs() <= allowed).all()


def test_the_scale_of_embeddings_is_a_number_of_the_weights_type(run: Run) -> None:
    embedding = run.stored["model.embed_tokens.weight"][run.token_ids].to(run.dtype).float()

    assert torch.equal(run.seen.entering[0], embedding * EMBEDDING_SCALE[run.dtype])


def test_weights_of_norms_are_never_rounded(run: Run) -> None:
    (weights,) = run.seen.weights
    prefix = "model.layers.0."
    norms = {
        "input_layernorm": weights.input_norm,
        "post_attention_layernorm": weights.attention_out_norm,
        "pre_feedforward_layernorm": weights.mlp_norm,
        "post_feedforward_layernorm": weights.mlp_out_norm,
        "self_attn.q_norm": weights.head_norm[0],
        "self_attn.k_norm": weights.head_norm[-1],
    }
    for name, norm in norms.items():
        stored = run.stored[f"{prefix}{name}.weight"]
        assert torch.equal(norm, 1 + stored)
        # Or the test would show nothing.
        assert not torch.equal(stored, stored.to(run.dtype).float())


def test_the_last_norm_is_rounded_once(run: Run) -> None:
    (hidden,) = run.seen.leaving
    wide = hidden.double()
    normed = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    exact = normed * (1 + run.stored["model.norm.weight"].double())

    assert_rounded_once(run.normed, exact)


def test_norms_of_heads_are_not_rounded_before_the_rotation(run: Run) -> None:
    (weights,), (heads,), ((cos, sin),) = run.seen.weights, run.seen.heads, run.seen.angles
    config = run.config
    x = torch.nn.functional.rms_norm(run.seen.entering[0], (1152,), weights.input_norm, 1e-5)
    plain = weights.qkv(x.to(run.dtype)).view(NUM_TOKENS, -1, config.head_dim).double()
    plain = plain[:, : config.num_heads + config.num_kv_heads]
    normed = plain / (plain.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weights.head_norm.double()
    first, second = normed.chunk(2, dim=-1)
    # The table of sines has the minus of rotate_half in its first half.
    exact = normed * cos.double() + torch.cat([second, first], dim=-1) * sin.double()

    assert_rounded_once(heads[:, : plain.shape[1]], exact)


@pytest.mark.parametrize("favorite", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_two_experts_a_rounding_step_apart_are_told_apart(favorite: int, dtype: torch.dtype) -> None:
    # Scores of 1 and 1 + 2^-11: the next number after 1 is 1 + 2^-7 in bfloat16 and 1 + 2^-10 in float16.
    router = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    router[favorite, 1] = 2.0**-11
    experts = Experts(
        config=MoeConfig(num_experts=2, num_chosen=2, intermediate_size=1, normalizes=False),
        activation="silu",
        router=router,
        gate_up=torch.zeros(2, 2, 2, dtype=dtype),
        down=torch.zeros(2, 2, 1, dtype=dtype),
    )

    weights, chosen = experts.choose(torch.ones(1, 2, dtype=dtype))

    assert chosen.tolist() == [[favorite, 1 - favorite]]
    # 1 / (1 + e^-x) and 1 / (1 + e^x), x = 2^-11
    assert weights.tolist()[0] == pytest.approx([0.5 + 2**-13, 0.5 - 2**-13], abs=1e-7)


def test_routers_are_never_rounded(tmp_path: Path) -> None:
    mixtral = Family(kind="mixtral", settings={"num_local_experts": 3, "num_hidden_layers": 1})
    run = run_of(mixtral, tmp_path, torch.bfloat16)
    (stored,) = (weight for name, weight in run.stored.items() if name.endswith(".gate.weight"))
    (weights,) = run.seen.weights

    assert isinstance(weights.mlp, Experts)
    assert torch.equal(weights.mlp.router, stored)
    assert not torch.equal(stored, stored.bfloat16().float())


def test_the_64_likeliest_logits_are_fp32() -> None:
    # 64 logits of 16 and a bit: numbers of bfloat16 are 0.125 apart there. The others are 1 + 2^-10.
    rows = [[16.0, token / 1024, 0.0] if token < 64 else [1.0, 2.0**-10, 0.0] for token in range(101)]
    head = torch.tensor(rows, dtype=torch.bfloat16)
    settings = Family(kind="llama", settings={"hidden_size": 3}).config().to_dict()
    config = ModelConfig.from_hf(settings | {"architectures": ["LlamaForCausalLM"]})
    weights = DecoderWeights(embedding=head, embedding_scale=1.0, layers=[], norm=torch.ones(3), head=head)
    decoder = Decoder(config, weights)
    normed = torch.ones(2, 3, dtype=torch.bfloat16)

    plain = decoder.logits(normed)
    scored = decoder.logits(normed, torch.tensor([70, 100]))

    expected = torch.tensor([16 + token / 1024 if token < 64 else 1.0 for token in range(101)])
    assert torch.equal(plain, expected.expand(2, -1))
    assert plain.argmax(dim=-1).tolist() == [63, 63]
    # And so is that of one token of each row that somebody asks for.
    assert scored[:, [70, 100]].tolist() == [[1 + 2.0**-10, 1.0], [1.0, 1 + 2.0**-10]]
