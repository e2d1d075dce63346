"""Which architectures the decoder in engine/model/decoder.py computes, and what each name implies.

Owns the list: the switches of a family, the values it takes for settings that config.json leaves out
(transformers' configuration classes have the same), and the names of a family's tensors where they
differ. What is not listed is refused by name. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.errors import ModelError
from baton.model_settings import whole_number

# (config.json, number of a layer) -> whether that layer does so.
LayerRule = Callable[[Mapping[str, Any], int], bool]


def _every(_config: Mapping[str, Any], _layer: int) -> bool:
    return True


def _no(_config: Mapping[str, Any], _layer: int) -> bool:
    return False


def _from_max_window_layers(config: Mapping[str, Any], layer: int) -> bool:
    first = config["max_window_layers"]
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ModelError(f"config.json: max_window_layers is {first!r}; it must be a number of layers")
    return layer >= first


def _all_but_each_nth(config: Mapping[str, Any], layer: int) -> bool:
    return bool((layer + 1) % whole_number(config, "sliding_window_pattern"))


def _by_sparse_step(config: Mapping[str, Any], layer: int) -> bool:
    dense_layers = config["mlp_only_layers"] or ()
    if not isinstance(dense_layers, list | tuple) or not all(type(dense) is int for dense in dense_layers):
        raise ModelError(f"config.json: mlp_only_layers is {dense_layers!r}; a list of layers is needed")
    return layer not in dense_layers and (layer + 1) % whole_number(config, "decoder_sparse_step") == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of a mixture's tensors within a layer; {} is the expert's number."""

    router: str
    gate: str
    up: str
    down: str
    intermediate_size: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One name of config.json's `architectures` and what it implies.

    qkv_bias, output_bias, mlp_bias: fixed by the architecture, or None where config.json's
        attention_bias or mlp_bias decides.
    qk_norm: queries and keys are normed per head before they are rotated.
    post_norms: attention and MLP are normed behind as well as before.
    centered_norms: norms' weights are stored less 1.
    scaled_embedding: embeddings are multiplied with sqrt(hidden_size).
    scale_by_scalar: scores are scaled by query_pre_attn_scalar, not by head_dim.
    rope_theta, local_theta: base of the rotary embedding where config.json has none, and of the one that
        windowed layers have for themselves; None if they have none.
    needs_window_switch: a window counts only if use_sliding_window is set.
    is_windowed: which layers have the window, unless layer_types says it; None if the family knows no window.
    experts: names of the mixture's tensors; None for a dense model.
    is_moe: which layers have experts.
    normalizes_experts: the weights of the chosen experts add up to 1; None where norm_topk_prob decides.
    defaults: of config.json's other settings.
    """

    name: str
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    post_norms: bool = False
    centered_norms: bool = False
    scaled_embedding: bool = False
    scale_by_scalar: bool = False
    rope_theta: float = 10000.0
    local_theta: float | None = None
    needs_window_switch: bool = False
    is_windowed: LayerRule | None = _every
    experts: ExpertNames | None = None
    is_moe: LayerRule = _no
    normalizes_experts: bool | None = True
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN_EXPERTS = ExpertNames(
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
    intermediate_size="moe_intermediate_size",
)
_MIXTRAL_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
    intermediate_size="intermediate_size",
)
_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072}
_QWEN = {
    "num_key_value_heads": 32,
    "max_window_layers": 28,
    "sliding_window": 4096,
    "max_position_embeddings": 32_768,
}

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            name="LlamaForCausalLM",
            qkv_bias=None,
            output_bias=None,
            mlp_bias=None,
            is_windowed=None,
            defaults={"max_position_embeddings": 2048},
        ),
        Architecture(name="MistralForCausalLM", defaults=_MISTRAL),
        # Mistral's layers with a window for some of them.
        Architecture(name="MinistralForCausalLM", defaults=_MISTRAL),
        Architecture(
            name="Qwen2ForCausalLM",
            qkv_bias=True,
            needs_window_switch=True,
            is_windowed=_from_max_window_layers,
            defaults=_QWEN,
        ),
        Architecture(
            name="Qwen3ForCausalLM",
            qkv_bias=None,
            output_bias=None,
            qk_norm=True,
            needs_window_switch=True,
            is_windowed=_from_max_window_layers,
            defaults={"head_dim": 128, **_QWEN},
        ),
        Architecture(
            name="Gemma3ForCausalLM",
            qkv_bias=None,
            output_bias=None,
            qk_norm=True,
            post_norms=True,
            centered_norms=True,
            scaled_embedding=True,
            scale_by_scalar=True,
            rope_theta=1_000_000.0,
            local_theta=10_000.0,
            is_windowed=_all_but_each_nth,
            defaults={
                "num_key_value_heads": 4,
                "head_dim": 256,
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "sliding_window_pattern": 6,
                "tie_word_embeddings": True,
                "max_position_embeddings": 131_072,
            },
        ),
        Architecture(
            name="MixtralForCausalLM",
            rope_theta=1_000_000.0,
            experts=_MIXTRAL_EXPERTS,
            is_moe=_every,
            defaults={
                "num_key_value_heads": 8,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131_072,
            },
        ),
        Architecture(
            name="Qwen3MoeForCausalLM",
            qkv_bias=None,
            output_bias=None,
            qk_norm=True,
            needs_window_switch=True,
            experts=_QWEN_EXPERTS,
            is_moe=_by_sparse_step,
            normalizes_experts=None,
            defaults={
                "num_key_value_heads": 4,
                "num_local_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "mlp_only_layers": (),
                "decoder_sparse_step": 1,
                "sliding_window": 4096,
                "max_position_embeddings": 32_768,
            },
        ),
    )
}


# Not a language model but a probe of the way KV travels (engine/model/tattletale.py); nobody is offered it.
TATTLE_TALE = Architecture(name="TattleTaleForCausalLM")


def find_architecture(names: Any) -> Architecture:
    """The architecture of these names in config.json; raises ModelError if none of them is supported."""
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json: architectures is {names!r}; write a list of names")
    for name in names:
        if name == TATTLE_TALE.name:
            return TATTLE_TALE
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    named = ", ".join(names) or "no architecture"
    raise ModelError(
        f"config.json names {named}, which is not supported; supported are {', '.join(sorted(ARCHITECTURES))}"
    )
