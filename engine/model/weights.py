"""Reads a checkpoint's tensors and builds the decoder from them.

safetensors only, memory-mapped. Everything that can be wrong with a checkpoint becomes a
ModelError naming the file or the tensor. q, k and v are fused into one matrix here, and
gate and up into another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from baton.errors import ModelError
from engine.model.decoder import Decoder, LayerWeights, Projection

if TYPE_CHECKING:
    from engine.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Checkpoint:
    """The tensors of one or more safetensors files, each read at most once by name.

    dtype: what tensors are converted to; None keeps the embedding's dtype for all.
    """

    def __init__(
        self, files: Sequence[Path], *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        self._readers: dict[str, Any] = {}
        self._files: dict[str, Path] = {}
        for path in files:
            reader = _open(path)
            for name in list(reader.keys()):
                self._readers[name], self._files[name] = reader, path
        self._unread = set(self._readers)
        self._folder = files[0].parent if files else Path()
        self._device = torch.device(device)
        self.dtype = dtype or self._raw(EMBEDDING).dtype

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor on the device; raises ModelError if it is missing or has another shape."""
        tensor = self._raw(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._files[name]}: tensor {name} has shape {tuple(tensor.shape)}, config.json asks for "
                f"{shape}; the two belong to different models, pull the model again"
            )
        self._unread.discard(name)
        return tensor.to(self._device, self.dtype)

    def ignore(self, *suffixes: str) -> None:
        """Tensors whose names end like this carry nothing that the decoder needs."""
        self._unread = {name for name in self._unread if not name.endswith(suffixes)}

    def check_all_read(self) -> None:
        """Raises ModelError if the checkpoint has tensors that nobody took: the model would differ."""
        if self._unread:
            name = min(self._unread)
            raise ModelError(
                f"{self._files[name]}: {len(self._unread)} tensors are not used by this architecture, "
                f"{name} among them; config.json does not describe this checkpoint"
            )

    def _raw(self, name: str) -> torch.Tensor:
        if name not in self._readers:
            raise ModelError(
                f"{self._folder}: the checkpoint has no tensor {name}, which config.json asks for; "
                "pull the model again"
            )
        tensor: torch.Tensor = self._readers[name].get_tensor(name)
        return tensor


def load_decoder(config: ModelConfig, checkpoint: Checkpoint) -> Decoder:
    """Builds the decoder; raises ModelError unless checkpoint and config agree exactly."""
    embedding = checkpoint.take(EMBEDDING, (config.vocab_size, config.hidden_size))
    layers = [_layer(config, checkpoint, f"model.layers.{index}.") for index in range(config.num_layers)]
    norm = checkpoint.take("model.norm.weight", (config.hidden_size,)).float()
    # Older checkpoints store the rope frequencies, some tied ones the head a second time.
    checkpoint.ignore(".rotary_emb.inv_freq")
    if config.tie_word_embeddings:
        checkpoint.ignore(HEAD)
        head = embedding
    else:
        head = checkpoint.take(HEAD, (config.vocab_size, config.hidden_size))
    checkpoint.check_all_read()
    return Decoder(config, embedding=embedding, layers=layers, norm=norm, head=head)


def _layer(config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    read = _Reader(checkpoint, prefix)
    return LayerWeights(
        input_norm=checkpoint.take(prefix + "input_layernorm.weight", (hidden,)).float(),
        qkv=read.projection(qkv, hidden, bias=config.attention_bias),
        output=read.projection({"self_attn.o_proj": hidden}, q_size, bias=config.output_bias),
        mlp_norm=checkpoint.take(prefix + "post_attention_layernorm.weight", (hidden,)).float(),
        gate_up=read.projection(gate_up, hidden, bias=config.mlp_bias),
        down=read.projection({"mlp.down_proj": hidden}, inner, bias=config.mlp_bias),
    )


class _Reader:
    """Reads projections of one layer, fusing several into one."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix

    def projection(self, out_sizes: dict[str, int], in_size: int, *, bias: bool) -> Projection:
        """out_sizes: name and rows of each part, in the order they are stacked."""
        weights = [self._take(f"{name}.weight", (size, in_size)) for name, size in out_sizes.items()]
        if not bias:
            return Projection(weight=_stack(weights))
        biases = [self._take(f"{name}.bias", (size,)) for name, size in out_sizes.items()]
        return Projection(weight=_stack(weights), bias=_stack(biases))

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._checkpoint.take(self._prefix + name, shape)


def _stack(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _open(path: Path) -> Any:
    try:
        # Mapped, not read: pages come in when a tensor is first touched.
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read ({error}); pull the model again") from error
