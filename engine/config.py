"""Two configurations: what a model is, and how an engine runs it.

Both are read once, at the entry point, and never change. No torch here: dtypes and
devices are names until engine/runner.py meets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.errors import ConfigError, ModelError
from engine.block_size import DEFAULT_EXPECTED_TOKENS
from engine.model.registry import find_architecture
from engine.model.rope import RopeConfig

DTYPES = ("auto", "bfloat16", "float16", "float32")
LAYOUTS = ("HND", "NHD")
_TOKENS_PER_STEP = ("max_batch_tokens", "chunk_tokens", "mixed_tokens")

# Settings of config.json that change the computation and that this decoder does not have.
_UNSUPPORTED = ("quantization_config", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything about a model's computation that its weights do not say.

    attention_bias: q, k and v have a bias; output_bias: so has the attention's output;
    mlp_bias: so have the three projections of the MLP.
    max_model_len: most tokens of prompt plus answer.
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
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"config.json: head_dim is {self.head_dim}; rotary embeddings need it even")

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Reads the contents of config.json and generation_config.json.

        Raises ModelError naming the architecture or the setting that is not supported.
        """
        architecture = find_architecture(config.get("architectures") or [])
        _refuse_unsupported(config)
        num_heads = _count(config, "num_attention_heads")
        hidden_size = _count(config, "hidden_size")
        return cls(
            architecture=architecture.name,
            num_layers=_count(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_count(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            vocab_size=_count(config, "vocab_size"),
            max_model_len=_count(config, "max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=architecture.has_qkv_bias(config),
            output_bias=architecture.has_output_bias(config),
            mlp_bias=bool(config.get("mlp_bias", False)),
            eos_token_ids=_eos_token_ids(config, generation_config or {}),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one engine runs its model.

    model: a folder, or the name of a pulled model.
    dtype: of weights and computation; "auto" is the checkpoint's.
    kv_dtype: of the cache; "auto" is that of the computation.
    device: a torch device name.  threads: intra-op threads; 0 is torch's choice.
    block_size: tokens per block; 0 chooses by the model and expected_tokens (engine/block_size.py).
    expected_tokens: mean length of prompt and answer.
    layout: order of heads and tokens within a block.
    kv_cache_bytes: size of the cache, allocated once at start; 0 is automatic: kv_memory_fraction of the
        memory that is free then, at most what max_running sequences of full length need.
    prefix_cache: keep the KV of finished requests until its blocks are needed, and reuse equal prefixes.
    max_batch_tokens: most tokens of one step.  chunk_tokens: most prompt tokens of one
        request in one step.  mixed_tokens: most prompt tokens of a step in which others decode,
        which bounds what a prompt adds to the gap between their tokens.
    max_running: most requests that hold a place in the batch.
    debug_nonfinite: if logits are not finite, compute the step again and name the layer where that begins.
    """

    model: str = field(default="", metadata={"help": "model folder, or the name of a pulled model"})
    dtype: str = field(
        default="auto", metadata={"help": "of weights and computation: auto, bfloat16, float16 or float32"}
    )
    kv_dtype: str = field(default="auto", metadata={"help": "of the KV cache; auto is that of the weights"})
    device: str = field(default="cpu", metadata={"help": "a torch device"})
    threads: int = field(default=0, metadata={"help": "threads of one operator; 0 is torch's choice"})
    block_size: int = field(
        default=0, metadata={"help": "tokens per block; 0 chooses by the model and expected_tokens"}
    )
    expected_tokens: int = field(
        default=DEFAULT_EXPECTED_TOKENS, metadata={"help": "mean length of prompt and answer, in tokens"}
    )
    layout: str = field(default="HND", metadata={"help": "order inside a block: HND or NHD"})
    kv_cache_bytes: int = field(
        default=0, metadata={"help": "size of the KV cache, in bytes; 0 takes kv_memory_fraction"}
    )
    kv_memory_fraction: float = field(
        default=0.2, metadata={"help": "share of the memory free at start for the KV cache"}
    )
    prefix_cache: bool = field(
        default=True, metadata={"help": "keep the KV of finished requests and reuse equal prefixes"}
    )
    max_batch_tokens: int = field(default=256, metadata={"help": "most tokens of one step"})
    chunk_tokens: int = field(default=128, metadata={"help": "most prompt tokens of one request in a step"})
    mixed_tokens: int = field(
        default=64, metadata={"help": "most prompt tokens of a step that decodes as well"}
    )
    max_running: int = field(default=64, metadata={"help": "most requests in the batch"})
    debug_nonfinite: bool = field(
        default=False, metadata={"help": "name the first layer of values that are not finite"}
    )

    def __post_init__(self) -> None:
        _require_choice("dtype", self.dtype, DTYPES)
        _require_choice("kv_dtype", self.kv_dtype, DTYPES)
        _require_choice("layout", self.layout, LAYOUTS)
        for key in ("threads", "block_size", "kv_cache_bytes"):
            _require_at_least(key, getattr(self, key), 0)
        for key in ("expected_tokens", *_TOKENS_PER_STEP, "max_running"):
            _require_at_least(key, getattr(self, key), 1)
        if not 0 < self.kv_memory_fraction <= 1:
            raise ConfigError(
                f"kv_memory_fraction is {self.kv_memory_fraction}; it must be above 0 and at most 1",
                field="kv_memory_fraction",
            )
        if self.max_running >= self.max_batch_tokens:
            raise ConfigError(
                f"max_running is {self.max_running}; it must be below max_batch_tokens "
                f"({self.max_batch_tokens}), or prompts could never be computed beside the decoding requests",
                field="max_running",
            )


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}; a positive number is needed")
    return value


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for key in _UNSUPPORTED:
        # Families whose window is switched off still carry its size.
        if config.get(key) is not None and not (key == "sliding_window" and _window_is_off(config)):
            raise ModelError(f"config.json: {key} is set to {config[key]!r}, which is not supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: hidden_act is {activation!r}; only silu is supported")


def _window_is_off(config: Mapping[str, Any]) -> bool:
    return config.get("use_sliding_window") is False


def _eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> frozenset[int]:
    # As baton.models.ModelDir reads it: a null in generation_config.json says nothing.
    value = generation_config.get("eos_token_id")
    value = config.get("eos_token_id") if value is None else value
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def _require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key} is {value!r}; it must be one of {', '.join(choices)}", field=key)


def _require_at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{key} is {value}; it must be at least {least}", field=key)
