"""Embedding, RMSNorm and the QKV product in one pass: the front of the first layer.

    hidden[t] = embedding[token_ids[t]] * scale
    qkv[t] = (hidden[t] / sqrt(mean(hidden[t]^2) + eps) * weight) @ qkv_weight^T + bias

A row's norm is one factor for all of its products, so the row's squares are summed beside them and the factor
comes at the end. hidden * weight then enters the product unnormed, which bfloat16 and fp32 hold whatever the
embedding's size; fp16 would lose small rows to underflow and large ones to overflow. With fp16, rows are read
twice: their norm first, then the product. Sums and products accumulate in fp32.

Layout: token_ids [T] int64, all inside the vocabulary; embedding [V, D], qkv_weight [O, D] and bias [O] in
one dtype, rows contiguous; weight [D] fp32. hidden [T, D] is fp32, qkv [T, O] in the weights' dtype.
Grid: (tiles of O, tiles of T), walked in groups of token tiles, so that programs near in time share weights.
Each program of a token tile stores its share of hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch.nn import functional

from engine.kernels.choices import UNMEASURED, Choices
from engine.kernels.kernel import Config, Kernel, Launch, bucket, type_name


def embed_rms_norm_qkv_reference(
    token_ids_T: torch.Tensor,
    embedding_VD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    qkv_OD: torch.Tensor,
    bias_O: torch.Tensor | None,
    *,
    embedding_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch."""
    hidden_TD = embedding_VD[token_ids_T].float() * embedding_scale
    normed_TD = functional.rms_norm(hidden_TD, weight_D.shape, weight_D, eps).to(qkv_OD.dtype)
    return hidden_TD, functional.linear(normed_TD, qkv_OD, bias_O)


@triton.jit
def _rows_at(embedding_ptrs, first, is_token, embedding_scale, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = first + tl.arange(0, BLOCK_D)
    inside = is_token[:, None] & (columns < WIDTH)[None, :]
    return tl.load(embedding_ptrs + columns[None, :], mask=inside, other=0.0).to(tl.float32) * embedding_scale


# The number of tokens differs from step to step: one compiled kernel serves them all.
@triton.jit(do_not_specialize=["num_tokens"])
def _embed_rms_norm_qkv_kernel(
    token_ids_ptr,
    embedding_ptr,
    weight_ptr,
    qkv_weight_ptr,
    bias_ptr,
    hidden_ptr,
    qkv_ptr,
    embedding_stride,
    qkv_weight_stride,
    hidden_stride,
    qkv_stride,
    num_tokens,
    embedding_scale,
    eps,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile_t, tile_o = tl.swizzle2d(
        tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), 8
    )
    tokens = (tile_t * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    outputs = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    is_token, is_output = tokens < num_tokens, outputs < OUTPUTS
    token_ids = tl.load(token_ids_ptr + tokens, mask=is_token, other=0).to(tl.int64)
    embedding_ptrs = embedding_ptr + token_ids[:, None] * embedding_stride
    hidden_ptrs = hidden_ptr + tokens[:, None] * hidden_stride
    qkv_weight_ptrs = qkv_weight_ptr + outputs.to(tl.int64)[None, :] * qkv_weight_stride

    for first in range(tile_o * BLOCK_D, WIDTH, tl.num_programs(0) * BLOCK_D):
        hidden = _rows_at(embedding_ptrs, first, is_token, embedding_scale, WIDTH, BLOCK_D)
        columns = first + tl.arange(0, BLOCK_D)
        tl.store(hidden_ptrs + columns[None, :], hidden, mask=is_token[:, None] & (columns < WIDTH)[None, :])

    squares = tl.zeros([BLOCK_T], tl.float32)
    factor = tl.full([BLOCK_T], 1.0, tl.float32)
    if NORM_FIRST:
        for first in range(0, WIDTH, BLOCK_D):
            hidden = _rows_at(embedding_ptrs, first, is_token, embedding_scale, WIDTH, BLOCK_D)
            squares += tl.sum(hidden * hidden, axis=1)
        factor = tl.math.rsqrt(squares / WIDTH + eps)

    product = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for first in range(0, WIDTH, BLOCK_D):
        columns = first + tl.arange(0, BLOCK_D)
        inside = columns < WIDTH
        hidden = _rows_at(embedding_ptrs, first, is_token, embedding_scale, WIDTH, BLOCK_D)
        if not NORM_FIRST:
            squares += tl.sum(hidden * hidden, axis=1)
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
        scaled = (hidden * factor[:, None] * weight[None, :]).to(qkv_weight_ptr.dtype.element_ty)
        qkv_weight = tl.load(
            qkv_weight_ptrs + columns[:, None], mask=inside[:, None] & is_output[None, :], other=0.0
        )
        product = tl.dot(scaled, qkv_weight, product, input_precision="ieee")
    if not NORM_FIRST:
        product *= tl.math.rsqrt(squares / WIDTH + eps)[:, None]
    if HAS_BIAS:
        product += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        qkv_ptr + tokens[:, None] * qkv_stride + outputs[None, :],
        product.to(qkv_ptr.dtype.element_ty),
        mask=is_token[:, None] & is_output[None, :],
    )


# Buckets of tokens that a choice is made for: each tile of tokens reads all weights again, so few tokens want
# one tile, and many want large ones.
_TOKENS = (16, 64, 256, 1024)


def _accepts(shape: Mapping[str, int | str], config: Config) -> bool:
    tokens = int(shape["tokens"])
    block_t, block_o, block_d = (config.constants[name] for name in ("BLOCK_T", "BLOCK_O", "BLOCK_D"))
    # fp32 takes twice the shared memory, and registers for both operands: no tensor core keeps its precision.
    fits_fp32 = block_t * block_d <= 2048 and block_o * block_d <= 4096 and block_t * block_o <= 4096
    return (fits_fp32 or shape["dtype"] != "float32") and min(tokens, 64) <= block_t <= tokens


KERNEL = Kernel(
    name="embed_rms_norm_qkv",
    function=_embed_rms_norm_qkv_kernel,
    configs=tuple(
        Config(
            constants={"BLOCK_T": block_t, "BLOCK_O": block_o, "BLOCK_D": block_d},
            num_warps=num_warps,
            num_stages=num_stages,
        )
        for block_t, block_o, block_d, num_warps, num_stages in (
            (16, 32, 128, 4, 3),
            (16, 64, 128, 4, 3),
            (128, 128, 32, 8, 3),
            (128, 128, 64, 8, 2),
            (128, 64, 32, 4, 3),
            (64, 64, 32, 4, 4),
            (64, 32, 64, 4, 3),
            (64, 128, 32, 4, 3),
        )
    ),
    accepts=_accepts,
)


def embed_rms_norm_qkv(
    token_ids_T: torch.Tensor,
    embedding_VD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    qkv_OD: torch.Tensor,
    bias_O: torch.Tensor | None,
    *,
    embedding_scale: float = 1.0,
    choices: Choices = UNMEASURED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [T, D] fp32 and qkv [T, O] in the weights' dtype. Token ids are not checked."""
    num_tokens, device = len(token_ids_T), embedding_VD.device
    hidden_TD = torch.empty((num_tokens, embedding_VD.shape[1]), dtype=torch.float32, device=device)
    qkv_TO = torch.empty((num_tokens, len(qkv_OD)), dtype=qkv_OD.dtype, device=device)
    choices.run(
        embed_rms_norm_qkv_launch(
            token_ids_T,
            embedding_VD,
            weight_D,
            eps,
            qkv_OD,
            bias_O,
            hidden_TD,
            qkv_TO,
            embedding_scale=embedding_scale,
        )
    )
    return hidden_TD, qkv_TO


def embed_rms_norm_qkv_launch(
    token_ids_T: torch.Tensor,
    embedding_VD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    qkv_OD: torch.Tensor,
    bias_O: torch.Tensor | None,
    hidden_TD: torch.Tensor,
    qkv_TO: torch.Tensor,
    *,
    embedding_scale: float = 1.0,
) -> Launch:
    """The call as data. Raises ValueError for tensors that the kernel cannot read."""
    num_tokens, (num_outputs, width) = len(token_ids_T), qkv_OD.shape
    _check(token_ids_T, embedding_VD, weight_D, qkv_OD, bias_O, hidden_TD, qkv_TO)
    return Launch(
        kernel=KERNEL,
        grid=lambda constants: (
            triton.cdiv(num_outputs, constants["BLOCK_O"]),
            triton.cdiv(num_tokens, constants["BLOCK_T"]),
        ),
        arguments={
            "token_ids_ptr": token_ids_T,
            "embedding_ptr": embedding_VD,
            "weight_ptr": weight_D,
            "qkv_weight_ptr": qkv_OD,
            "bias_ptr": bias_O,
            "hidden_ptr": hidden_TD,
            "qkv_ptr": qkv_TO,
            "embedding_stride": embedding_VD.stride(0),
            "qkv_weight_stride": qkv_OD.stride(0),
            "hidden_stride": hidden_TD.stride(0),
            "qkv_stride": qkv_TO.stride(0),
            "num_tokens": num_tokens,
            "embedding_scale": float(embedding_scale),
            "eps": float(eps),
        },
        constants={
            "WIDTH": width,
            "OUTPUTS": num_outputs,
            "HAS_BIAS": bias_O is not None,
            "NORM_FIRST": qkv_OD.dtype == torch.float16,
        },
        shape=(
            ("width", width),
            ("outputs", num_outputs),
            ("tokens", bucket(num_tokens, _TOKENS)),
            ("bias", int(bias_O is not None)),
            ("dtype", type_name(qkv_OD)),
        ),
    )


def _check(
    token_ids_T: torch.Tensor,
    embedding_VD: torch.Tensor,
    weight_D: torch.Tensor,
    qkv_OD: torch.Tensor,
    bias_O: torch.Tensor | None,
    hidden_TD: torch.Tensor,
    qkv_TO: torch.Tensor,
) -> None:
    (num_outputs, width), num_tokens = qkv_OD.shape, len(token_ids_T)
    if token_ids_T.dtype != torch.int64 or not token_ids_T.is_contiguous():
        raise ValueError("token_ids must be int64 and contiguous")
    if hidden_TD.dtype != torch.float32 or weight_D.dtype != torch.float32:
        raise ValueError(f"hidden and weight must be float32; they are {hidden_TD.dtype}, {weight_D.dtype}")
    weights = [embedding_VD, qkv_OD, qkv_TO] if bias_O is None else [embedding_VD, qkv_OD, qkv_TO, bias_O]
    if any(tensor.dtype != qkv_OD.dtype for tensor in weights):
        raise ValueError("embedding, qkv weight, bias and qkv must have one dtype")
    if embedding_VD.shape[1] != width or weight_D.shape != (width,):
        raise ValueError(f"embedding and the norm's weight must have the qkv weight's {width} columns")
    if hidden_TD.shape != (num_tokens, width) or qkv_TO.shape != (num_tokens, num_outputs):
        raise ValueError("hidden must be [T, D] and qkv [T, O] for token_ids [T] and a qkv weight [O, D]")
    if bias_O is not None and bias_O.shape != (num_outputs,):
        raise ValueError(f"bias must be [O] for the qkv weight's {num_outputs} rows")
    if any(tensor.stride(-1) != 1 for tensor in (*weights, hidden_TD, weight_D)):
        raise ValueError("embedding, weights, hidden and qkv must have contiguous rows")
