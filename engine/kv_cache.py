"""The paged KV cache: one allocation, made at start, never inside a request.

Owns the memory and its layout. Which block belongs to whom is engine/block_pool.py's
business. Token t of a sequence lies in slot block_ids[t // bs] * bs + t % bs.

Dimensions: N num_blocks, L layers, 2 keys and values, K kv heads, b block_size, h head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from baton.errors import ConfigError
from baton.host_memory import available_host_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Size and layout of a cache. layout: "HND" keeps a head's tokens together, "NHD" a token's heads."""

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    layout: str = "HND"

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers: 2 * L * K * h * element size."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.bytes_per_token * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.bytes_per_block * self.num_blocks

    def with_blocks(self, num_blocks: int) -> CacheShape:
        """The same shape with another number of blocks."""
        return replace(self, num_blocks=num_blocks)

    @property
    def physical(self) -> tuple[int, ...]:
        """Dimensions as they lie in memory."""
        inner = (self.num_kv_heads, self.block_size)
        if self.layout == "NHD":
            inner = (self.block_size, self.num_kv_heads)
        return (self.num_blocks, self.num_layers, 2, *inner, self.head_dim)


class KVCache:
    """The cache of one engine.

    data: [N, L, 2, K, b, h] (HND) or [N, L, 2, b, K, h] (NHD), contiguous; a block of all
        layers is one run of bytes.
    logical: the same memory seen as [N, L, 2, K, b, h] in both layouts; only strides differ.
    """

    def __init__(self, shape: CacheShape, device: torch.device | str = "cpu") -> None:
        if shape.layout not in ("HND", "NHD"):
            raise ConfigError(f"layout is {shape.layout!r}; it must be HND or NHD", field="layout")
        self.shape = shape
        self.device = torch.device(device)
        _check_memory(shape.num_bytes, self.device)
        # zero_() touches every page now, so that no request pays for the first touch.
        self.data = torch.empty(shape.physical, dtype=shape.dtype, device=self.device).zero_()
        self.logical = self.data.transpose(3, 4) if shape.layout == "NHD" else self.data
        self._layers = [self.logical[:, layer] for layer in range(shape.num_layers)]

    def keys(self, layer: int) -> torch.Tensor:
        """[N, K, b, h] view of one layer's keys, strided as the layout demands."""
        return self._layers[layer][:, 0]

    def values(self, layer: int) -> torch.Tensor:
        """[N, K, b, h] view of one layer's values, strided as the layout demands."""
        return self._layers[layer][:, 1]

    def layer(self, layer: int) -> torch.Tensor:
        """[N, 2, K, b, h] view of one layer's keys and values."""
        return self._layers[layer]

    def written(self) -> torch.cuda.Event | None:
        """Fires once what the caller's stream has written so far is there; None on a CPU, where it is."""
        if self.device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def synchronize(self) -> None:
        """Returns once what the caller's stream has written is there."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def available_bytes(device: torch.device) -> int | None:
    """Memory that an allocation on the device could really get; None where it cannot be known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu":
        return available_host_bytes()
    return None


def _check_memory(num_bytes: int, device: torch.device) -> None:
    available = available_bytes(device)
    if available is not None and num_bytes > available:
        raise ConfigError(
            f"the KV cache needs {num_bytes} bytes on {device}, but only {available} are free; "
            f"set kv_cache_bytes to less than that",
            field="kv_cache_bytes",
        )
