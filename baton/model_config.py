"""What a model computes, read once from config.json: one description for every family.

The decoder, the loader and the cache know a model only through it. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.context_length import max_model_len, rope_steps
from baton.errors import ModelError
from baton.architectures import Architecture, find_architecture
from baton.rope_config import RopeConfig, ropes_of

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_FULL, _SLIDING = "full_attention", "sliding_attention"

# Settings that change the computation and that this decoder does not have.
_UNSUPPORTED = (
    "quantization_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What one layer has of its own.

    window: tokens that a query sees, itself among them; 0 is all of them.
    rope: its rotary embedding, an index of ModelConfig.ropes.
    is_moe: its MLP is a mixture of experts.
    """

    window: int = 0
    rope: int = 0
    is_moe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The mixtures of experts.

    num_chosen: experts that compute each token.  normalizes: their weights add up to 1.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalizes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything about a model's computation that its weights do not say.

    max_model_len: most tokens of prompt plus answer.  rope_steps: see baton.limits.Limits.
    attention_bias: q, k and v have a bias; output_bias: so has the attention's output; mlp_bias: so
        have the three projections of the MLP.
    attention_scale: what scores are multiplied with.
    embedding_scale: what embeddings are multiplied with.
    qk_norm, post_norms, centered_norms: see baton.architectures.Architecture.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    ropes: tuple[RopeConfig, ...]
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    rope_steps: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    activation: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    centered_norms: bool = False
    moe: MoeConfig | None = None
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"config.json: head_dim is {self.head_dim}; rotary embeddings need it even")

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct windows of its layers, rising."""
        return tuple(sorted({layer.window for layer in self.layers}))

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Reads the contents of config.json and generation_config.json.

        Raises ModelError naming the architecture or the setting that is not supported.
        """
        architecture = find_architecture(config.get("architectures") or [])
        eos_token_ids = _eos_token_ids(config, generation_config or {})
        config = {**architecture.defaults, **config}
        _refuse_unsupported(architecture, config)
        num_heads = _count(config, "num_attention_heads")
        hidden_size = _count(config, "hidden_size")
        head_dim = config.get("head_dim") or hidden_size // num_heads
        ropes = ropes_of(config, default_theta=architecture.rope_theta, local_theta=architecture.local_theta)
        return cls(
            architecture=architecture.name,
            num_layers=_count(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_count(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            vocab_size=_count(config, "vocab_size"),
            max_model_len=max_model_len(config),
            rope_steps=rope_steps(config),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            ropes=tuple(ropes.values()),
            layers=_layers(architecture, config, list(ropes)),
            attention_scale=_attention_scale(architecture, config, head_dim),
            embedding_scale=hidden_size**0.5 if architecture.scaled_embedding else 1.0,
            activation=_activation(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=_fixed_or_set(architecture.qkv_bias, config, "attention_bias"),
            output_bias=_fixed_or_set(architecture.output_bias, config, "attention_bias"),
            mlp_bias=_fixed_or_set(architecture.mlp_bias, config, "mlp_bias"),
            qk_norm=architecture.qk_norm,
            post_norms=architecture.post_norms,
            centered_norms=architecture.centered_norms,
            moe=_moe(architecture, config),
            eos_token_ids=eos_token_ids,
        )


def _layers(
    architecture: Architecture, config: Mapping[str, Any], ropes: list[str]
) -> tuple[LayerConfig, ...]:
    """ropes: kinds of layers that have rotary embeddings of their own, in the order of ModelConfig.ropes."""
    kinds = _layer_kinds(architecture, config)
    window = _window(architecture, config) if _SLIDING in kinds else 0
    has_experts = bool(config.get("num_experts", config.get("num_local_experts", 0)))
    return tuple(
        LayerConfig(
            window=window if kind == _SLIDING else 0,
            rope=ropes.index(kind) if kind in ropes else 0,
            is_moe=has_experts and architecture.is_moe(config, index),
        )
        for index, kind in enumerate(kinds)
    )


def _layer_kinds(architecture: Architecture, config: Mapping[str, Any]) -> list[str]:
    """Of each layer: which of layer_types' two kinds it is."""
    num_layers = _count(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        rule = architecture.is_windowed if _has_window(architecture, config) else None
        return [_SLIDING if rule and rule(config, layer) else _FULL for layer in range(num_layers)]
    unknown = sorted(set(kinds) - {_FULL, _SLIDING})
    if unknown or len(kinds) != num_layers:
        raise ModelError(
            f"config.json: layer_types must name {num_layers} layers, each {_FULL} or {_SLIDING}; it has "
            f"{len(kinds)}{f', {unknown[0]!r} among them' if unknown else ''}"
        )
    return list(kinds)


def _has_window(architecture: Architecture, config: Mapping[str, Any]) -> bool:
    # Families whose window is switched off still carry its size.
    is_on = not architecture.needs_window_switch or bool(config.get("use_sliding_window"))
    return is_on and config.get("sliding_window") is not None


def _window(architecture: Architecture, config: Mapping[str, Any]) -> int:
    return _count(config, "sliding_window") if _has_window(architecture, config) else 0


def _attention_scale(architecture: Architecture, config: Mapping[str, Any], head_dim: int) -> float:
    if not architecture.scale_by_scalar:
        return float(head_dim**-0.5)
    scalar = config.get("query_pre_attn_scalar")
    if not isinstance(scalar, int | float) or scalar <= 0:
        raise ModelError(f"config.json: query_pre_attn_scalar is {scalar!r}; a positive number is needed")
    return float(scalar**-0.5)


def _moe(architecture: Architecture, config: Mapping[str, Any]) -> MoeConfig | None:
    if architecture.experts is None:
        return None
    # transformers has written either name.
    num_experts = _count(config, "num_experts" if "num_experts" in config else "num_local_experts")
    num_chosen = _count(config, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok is {num_chosen}; there are only {num_experts} experts"
        )
    return MoeConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=_count(config, architecture.experts.intermediate_size),
        normalizes=_fixed_or_set(architecture.normalizes_experts, config, "norm_topk_prob"),
    )


def _fixed_or_set(fixed: bool | None, config: Mapping[str, Any], key: str) -> bool:
    return bool(config.get(key, False)) if fixed is None else fixed


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}; a positive number is needed")
    return value


def _refuse_unsupported(architecture: Architecture, config: Mapping[str, Any]) -> None:
    unknown = () if architecture.is_windowed else ("sliding_window",)
    for key in (*_UNSUPPORTED, *unknown):
        if config.get(key) not in (None, False):
            raise ModelError(
                f"config.json: {key} is {config[key]!r}, which is not supported for {architecture.name}"
            )


def _activation(config: Mapping[str, Any]) -> str:
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    activation = config.get(key, "silu")
    if activation not in ACTIVATIONS:
        raise ModelError(f"config.json: {key} is {activation!r}; supported are {', '.join(ACTIVATIONS)}")
    return str(activation)


def _eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> frozenset[int]:
    # As baton.models.ModelDir reads it: a null in generation_config.json says nothing.
    value = generation_config.get("eos_token_id")
    value = config.get("eos_token_id") if value is None else value
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
