"""What computes the same as a kernel without it: plain torch, torch's attention, and torch.compile's.

Each is made of a call's own tensors, whose values count for nothing here. Torch's attention gets keys and
values that lie together already, which a paged cache would have to be gathered for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from engine.kernels.kernel import Launch
from engine.kernels.model_launches import Step
from engine.model.layers import gated, rotated

EAGER, SDPA, COMPILED = "eager", "SDPA", "compiled"

Call = Callable[[], object]
Arguments = Mapping[str, Any]


def peers_of(launch: Launch, step: Step) -> dict[str, Call]:
    """By name of the peer, for a call of a step."""
    arguments, name = launch.arguments, launch.kernel.name
    if name in ("prefill_attention", "paged_attention"):
        return {SDPA: _attention(arguments, step)}
    if name == "embed_rms_norm_qkv":
        return {EAGER: lambda: _embed(arguments)}
    if name == "block_copy":
        return {EAGER: _block_copy(arguments, is_gather=launch.constants["IS_GATHER"])}
    function, operands = _ROWWISE[name](arguments)
    return {EAGER: lambda: function(*operands), COMPILED: lambda: _compiled(function)(*operands)}


_programs: dict[Any, Any] = {}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    if function not in _programs:
        # Sizes are constants to it, and the number of tokens is none from the second one on: its own way.
        _programs[function] = torch.compile(function)
    program: Callable[..., Any] = _programs[function]
    return program


def _attention(arguments: Arguments, step: Step) -> Call:
    q_THh, cache_N2Kbh = arguments["q_ptr"], arguments["cache_ptr"]
    num_heads, head_dim = q_THh.shape[1:]
    q_BHqh = q_THh.view(step.num_sequences, step.new_tokens, num_heads, head_dim).transpose(1, 2)
    shape = (step.num_sequences, cache_N2Kbh.shape[2], step.context, head_dim)
    k_BKch, v_BKch = (torch.empty(shape, dtype=q_THh.dtype, device=q_THh.device).normal_() for _ in range(2))
    is_causal = step.new_tokens > 1
    return lambda: functional.scaled_dot_product_attention(
        q_BHqh, k_BKch, v_BKch, is_causal=is_causal, enable_gqa=True
    )


def _block_copy(arguments: Arguments, *, is_gather: bool) -> Call:
    cache, wire, block_ids = (arguments[name] for name in ("cache_ptr", "wire_ptr", "block_ids_ptr"))
    block_ids = block_ids.long()
    if is_gather:
        return lambda: torch.index_select(cache, 0, block_ids, out=wire)
    return lambda: cache.index_copy_(0, block_ids, wire)


def _embed(arguments: Arguments) -> torch.Tensor:
    weight_D = arguments["weight_ptr"]
    hidden_TD = arguments["embedding_ptr"][arguments["token_ids_ptr"]].float()
    normed_TD = functional.rms_norm(hidden_TD, weight_D.shape, weight_D, arguments["eps"])
    qkv_OD = arguments["qkv_weight_ptr"]
    return functional.linear(normed_TD.to(qkv_OD.dtype), qkv_OD, arguments["bias_ptr"])


def _add(
    hidden_TD: torch.Tensor, delta_TD: torch.Tensor, weight_D: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_TD = hidden_TD + delta_TD
    return hidden_TD, functional.rms_norm(hidden_TD, weight_D.shape, weight_D, 1e-5).to(delta_TD.dtype)


def _gate(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    return gated(gate_up_T2F, "silu")


def _store(
    qkv_TNh: torch.Tensor,
    cos_T1h: torch.Tensor,
    sin_T1h: torch.Tensor,
    cache_N2Kbh: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    num_kv_heads, block_size = cache_N2Kbh.shape[2:4]
    heads = rotated(qkv_TNh[:, :-num_kv_heads], cos_T1h, sin_T1h).to(qkv_TNh.dtype)
    kv_T2Kh = torch.stack((heads[:, -num_kv_heads:], qkv_TNh[:, -num_kv_heads:]), dim=1)
    cache_N2Kbh[slots_T // block_size, :, :, slots_T % block_size] = kv_T2Kh
    return heads


_ROWWISE: Mapping[str, Callable[[Arguments], tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]] = {
    "add_rms_norm": lambda a: (_add, (a["hidden_ptr"], a["delta_ptr"], a["weight_ptr"])),
    "gated_activation": lambda a: (_gate, (a["gate_up_ptr"],)),
    "rope_store_kv": lambda a: (
        _store,
        (a["qkv_ptr"], a["cos_ptr"], a["sin_ptr"], a["cache_ptr"], a["slots_ptr"]),
    ),
}
