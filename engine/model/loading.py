"""Builds the decoder from a checkpoint: which tensor goes where, for every family.

Owns the names of tensors. Weights that are one product in the decoder (q, k and v; gate and up; a layer's
experts) are allocated once and filled part by part, so no weight is ever in memory twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from baton.architectures import ARCHITECTURES
from baton.logs import get_logger
from engine.host_memory import return_freed_memory
from engine.model.decoder import Decoder
from engine.model.forward_pass import DecoderWeights
from engine.model.layer import LayerWeights, Mlp, Projection
from engine.model.moe import Experts
from engine.model.packed import packed
from engine.model.weights import EMBEDDING, HEAD

if TYPE_CHECKING:
    from baton.architectures import ExpertNames
    from baton.model_config import ModelConfig
    from engine.model.weights import Checkpoint

log = get_logger(__name__)


def load_decoder(config: ModelConfig, checkpoint: Checkpoint, *, packs: bool = False) -> Decoder:
    """Builds the decoder; raises ModelError unless checkpoint and config agree exactly.

    packs: weights of products are packed as soon as they are read (engine.model.packed); those of experts
        stay as they are.
    """
    embedding, head = _embedding_and_head(config, checkpoint)
    checkpoint.release()
    layers = []
    for index in range(config.num_layers):
        layers.append(_Layer(config, checkpoint, index, packs=packs).read())
        checkpoint.release()
        if packs:
            # What is packed lies between the holes of what it was packed from.
            return_freed_memory()
    norm = _norm(config, checkpoint, "model.norm.weight", config.hidden_size)
    # Older checkpoints store the rope frequencies.
    checkpoint.ignore(".rotary_emb.inv_freq")
    checkpoint.release()
    checkpoint.check_all_read()
    scale = torch.tensor(config.embedding_scale, dtype=embedding.dtype).item()
    weights = DecoderWeights(embedding=embedding, embedding_scale=scale, layers=layers, norm=norm, head=head)
    return Decoder(config, weights, packs=packs)


def _embedding_and_head(config: ModelConfig, checkpoint: Checkpoint) -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor where the two are tied, whichever of them is stored.

    Both stored with different values are two tensors, whatever config.json says: transformers' tie_weights
    does so.
    """
    shape = (config.vocab_size, config.hidden_size)
    if not config.tie_word_embeddings:
        return checkpoint.take(EMBEDDING, shape), checkpoint.take(HEAD, shape)
    if not checkpoint.has(EMBEDDING) and checkpoint.has(HEAD):
        head = checkpoint.take(HEAD, shape)
        return head, head
    embedding = checkpoint.take(EMBEDDING, shape)
    if not checkpoint.has(HEAD):
        return embedding, embedding
    if checkpoint.holds(embedding, HEAD):
        checkpoint.ignore(HEAD)
        return embedding, embedding
    log.warning(
        "config.json ties the head to the embedding, but the checkpoint has a head of its own, "
        "which is used; set tie_word_embeddings to false",
        tensor=HEAD,
    )
    return embedding, checkpoint.take(HEAD, shape)


def _norm(config: ModelConfig, checkpoint: Checkpoint, name: str, size: int) -> torch.Tensor:
    weight = checkpoint.take(name, (size,), dtype=torch.float32)
    return weight + 1 if config.centered_norms else weight


class _Layer:
    """Reads one layer."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, index: int, *, packs: bool) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._packs = packs
        self._prefix = f"model.layers.{index}."
        self._is_moe = config.layers[index].is_moe

    def read(self) -> LayerWeights:
        config, hidden = self._config, self._config.hidden_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        # With norms on both sides, what the others call post_attention_layernorm is behind attention.
        mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        return LayerWeights(
            input_norm=self._norm("input_layernorm"),
            qkv=self._projection(qkv, hidden, bias=config.attention_bias),
            head_norm=self._head_norm() if config.qk_norm else None,
            output=self._projection({"self_attn.o_proj": hidden}, q_size, bias=config.output_bias),
            attention_out_norm=self._norm("post_attention_layernorm") if config.post_norms else None,
            mlp_norm=self._norm(mlp_norm),
            mlp=self._experts() if self._is_moe else self._mlp(),
            mlp_out_norm=self._norm("post_feedforward_layernorm") if config.post_norms else None,
        )

    def _mlp(self) -> Mlp:
        hidden, inner, bias = self._config.hidden_size, self._config.intermediate_size, self._config.mlp_bias
        gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        return Mlp(
            activation=self._config.activation,
            gate_up=self._projection(gate_up, hidden, bias=bias),
            down=self._projection({"mlp.down_proj": hidden}, inner, bias=bias),
        )

    def _experts(self) -> Experts:
        config, names = self._config.moe, ARCHITECTURES[self._config.architecture].experts
        assert config is not None, "a layer is one of experts only where the model has any"
        assert names is not None, "so is its architecture"
        hidden, inner = self._config.hidden_size, config.intermediate_size
        experts = Experts(
            config=config,
            activation=self._config.activation,
            router=self._checkpoint.take(
                f"{self._prefix}{names.router}.weight", (config.num_experts, hidden), dtype=torch.float32
            ),
            gate_up=self._empty(config.num_experts, 2 * inner, hidden),
            down=self._empty(config.num_experts, hidden, inner),
        )
        for expert in range(config.num_experts):
            self._fill_expert(experts, names, expert)
        return experts

    def _fill_expert(self, experts: Experts, names: ExpertNames, expert: int) -> None:
        gate, up = experts.gate_up[expert].chunk(2)
        for out, name in ((gate, names.gate), (up, names.up), (experts.down[expert], names.down)):
            self._take_into(out, f"{name.format(expert)}.weight")

    def _head_norm(self) -> torch.Tensor:
        """[H + K, h]: every query head has the one norm, every key head the other."""
        config = self._config
        q_norm, k_norm = (self._norm(f"self_attn.{name}", config.head_dim) for name in ("q_norm", "k_norm"))
        return torch.cat([q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)])

    def _norm(self, name: str, size: int | None = None) -> torch.Tensor:
        size = size or self._config.hidden_size
        return _norm(self._config, self._checkpoint, f"{self._prefix}{name}.weight", size)

    def _projection(self, out_sizes: Mapping[str, int], in_size: int, *, bias: bool) -> Projection:
        """out_sizes: name and rows of each part, in the order they are stacked."""
        weight = self._stacked(out_sizes, "weight", in_size)
        if self._packs:
            weight = packed(weight)
        return Projection(weight=weight, bias=self._stacked(out_sizes, "bias") if bias else None)

    def _stacked(self, out_sizes: Mapping[str, int], kind: str, *inner: int) -> torch.Tensor:
        stacked = self._empty(sum(out_sizes.values()), *inner)
        parts = torch.split(stacked, list(out_sizes.values()))
        for name, part in zip(out_sizes, parts, strict=True):
            self._take_into(part, f"{name}.{kind}")
        return stacked

    def _take_into(self, out: torch.Tensor, name: str) -> None:
        self._checkpoint.take_into(out, self._prefix + name)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._checkpoint.dtype, device=self._checkpoint.device)
