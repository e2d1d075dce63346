"""What a model computes, read once from config.json: one description for every family.

Every process reads it; what is not supported is refused by all of them, in the same words. The decoder, the
loader, the cache, the limits and the fingerprint know a model only through it. No torch, no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.architectures import Architecture, find_architecture
from baton.errors import ModelError
from baton.limits import Limits
from baton.model_settings import positive_number, switch, whole_number
from baton.rope_config import RopeConfig, max_model_len, rope_steps, ropes_of
from baton.rope_parameters import FULL, SLIDING

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")

# Settings that change the computation and that this decoder does not have.
_UNSUPPORTED = (
    "quantization_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
)
# Where a null is not the same as silence: it means no window, as many heads for KV as for queries, and heads
# that share the hidden size.
_NULL_IS_A_VALUE = ("sliding_window", "num_key_value_heads", "head_dim")


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
    ropes: the distinct rotary embeddings of its layers, in the order in which layers first have them.
    attention_bias: q, k and v have a bias; output_bias: so has the attention's output; mlp_bias: so
        have the three projections of the MLP.
    attention_scale: what scores are multiplied with.
    embedding_scale: what embeddings are multiplied with.
    qk_norm, post_norms, centered_norms: see baton.architectures.Architecture.
    eos_token_ids: ids that end a generation, in the file's order: generation_config.json's, else
        config.json's, else none.  bos_token_id: id that begins a text, or None.
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
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"config.json: head_dim is {self.head_dim}; rotary embeddings need it even")
        for rope in self.ropes:
            rope.check_head_dim(self.head_dim)

    @property
    def limits(self) -> Limits:
        """What the model can take."""
        return Limits(
            max_model_len=self.max_model_len, vocab_size=self.vocab_size, rope_steps=self.rope_steps
        )

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
        architecture = find_architecture(config.get("architectures"))
        config = _with_defaults(architecture, config)
        _refuse_unsupported(architecture, config)
        num_heads = whole_number(config, "num_attention_heads")
        hidden_size = whole_number(config, "hidden_size")
        head_dim = _head_dim(config, hidden_size, num_heads)
        ropes, layers = _layers(architecture, config)
        longest = max_model_len(config, local_theta=architecture.local_theta)
        bos_token_ids = _token_ids("bos_token_id", config, generation_config or {})
        return cls(
            architecture=architecture.name,
            num_layers=whole_number(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=whole_number(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=_number_or(config, "num_key_value_heads", num_heads),
            head_dim=head_dim,
            vocab_size=whole_number(config, "vocab_size"),
            max_model_len=longest,
            rope_steps=rope_steps(ropes, longest),
            rms_norm_eps=positive_number(config, "rms_norm_eps", 1e-6),
            ropes=ropes,
            layers=layers,
            attention_scale=_attention_scale(architecture, config, head_dim),
            embedding_scale=hidden_size**0.5 if architecture.scaled_embedding else 1.0,
            activation=_activation(architecture, config),
            tie_word_embeddings=switch(config, "tie_word_embeddings"),
            attention_bias=_fixed_or_set(architecture.qkv_bias, config, "attention_bias"),
            output_bias=_fixed_or_set(architecture.output_bias, config, "attention_bias"),
            mlp_bias=_fixed_or_set(architecture.mlp_bias, config, "mlp_bias"),
            qk_norm=architecture.qk_norm,
            post_norms=architecture.post_norms,
            centered_norms=architecture.centered_norms,
            moe=_moe(architecture, config),
            eos_token_ids=_token_ids("eos_token_id", config, generation_config or {}),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        )


def _with_defaults(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json over what the architecture takes where it is silent; a null says nothing."""
    said = {key: value for key, value in config.items() if value is not None or key in _NULL_IS_A_VALUE}
    return {**architecture.defaults, **said}


def _layers(
    architecture: Architecture, config: Mapping[str, Any]
) -> tuple[tuple[RopeConfig, ...], tuple[LayerConfig, ...]]:
    """ModelConfig.ropes and ModelConfig.layers."""
    kinds = _layer_kinds(architecture, config)
    window = _window(architecture, config) if SLIDING in kinds else 0
    by_kind = ropes_of(config, default_theta=architecture.rope_theta, local_theta=architecture.local_theta)
    by_layer = [by_kind.get(kind, by_kind[FULL]) for kind in kinds]
    ropes = tuple(dict.fromkeys(by_layer))
    layers = tuple(
        LayerConfig(
            window=window if kind == SLIDING else 0,
            rope=ropes.index(by_layer[index]),
            is_moe=architecture.is_moe(config, index),
        )
        for index, kind in enumerate(kinds)
    )
    return ropes, layers


def _layer_kinds(architecture: Architecture, config: Mapping[str, Any]) -> list[str]:
    """Of each layer: which of layer_types' two kinds it is."""
    num_layers = whole_number(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        rule = architecture.is_windowed if _has_window(architecture, config) else None
        return [SLIDING if rule and rule(config, layer) else FULL for layer in range(num_layers)]
    kinds = kinds if isinstance(kinds, list) else [kinds]
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown or len(kinds) != num_layers:
        raise ModelError(
            f"config.json: layer_types must name {num_layers} layers, each {FULL} or {SLIDING}; it has "
            f"{len(kinds)}{f', {unknown[0]!r} among them' if unknown else ''}"
        )
    return kinds


def _has_window(architecture: Architecture, config: Mapping[str, Any]) -> bool:
    # Families whose window is switched off still carry its size.
    is_on = not architecture.needs_window_switch or switch(config, "use_sliding_window")
    return is_on and config.get("sliding_window") is not None


def _window(architecture: Architecture, config: Mapping[str, Any]) -> int:
    return whole_number(config, "sliding_window") if _has_window(architecture, config) else 0


def _attention_scale(architecture: Architecture, config: Mapping[str, Any], head_dim: int) -> float:
    if not architecture.scale_by_scalar:
        return float(head_dim**-0.5)
    return float(positive_number(config, "query_pre_attn_scalar") ** -0.5)


def _moe(architecture: Architecture, config: Mapping[str, Any]) -> MoeConfig | None:
    if architecture.experts is None:
        return None
    # transformers has written either name.
    num_experts = whole_number(config, "num_experts" if "num_experts" in config else "num_local_experts")
    num_chosen = whole_number(config, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok is {num_chosen}; there are only {num_experts} experts"
        )
    return MoeConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=whole_number(config, architecture.experts.intermediate_size),
        normalizes=_fixed_or_set(architecture.normalizes_experts, config, "norm_topk_prob"),
    )


def _fixed_or_set(fixed: bool | None, config: Mapping[str, Any], key: str) -> bool:
    return switch(config, key) if fixed is None else fixed


def _refuse_unsupported(architecture: Architecture, config: Mapping[str, Any]) -> None:
    unknown = () if architecture.is_windowed else ("sliding_window",)
    for key in (*_UNSUPPORTED, *unknown):
        if config.get(key) not in (None, False):
            raise ModelError(
                f"config.json: {key} is {config[key]!r}, which is not supported for {architecture.name}"
            )


def _activation(architecture: Architecture, config: Mapping[str, Any]) -> str:
    key = "hidden_activation" if "hidden_activation" in architecture.defaults else "hidden_act"
    activation = config.get(key, "silu")
    if activation not in ACTIVATIONS:
        raise ModelError(f"config.json: {key} is {activation!r}; supported are {', '.join(ACTIVATIONS)}")
    return str(activation)


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}; "
            "write head_dim"
        )
    return _number_or(config, "head_dim", hidden_size // num_heads)


def _number_or(config: Mapping[str, Any], key: str, default: int) -> int:
    return default if config.get(key) is None else whole_number(config, key)


def _token_ids(key: str, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    # A null in generation_config.json says nothing.
    source, value = "generation_config.json", generation_config.get(key)
    if value is None:
        source, value = "config.json", config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0 for token_id in ids):
        raise ModelError(f"{source}: {key} is {value!r}; write a token id or a list of them")
    return tuple(ids)
