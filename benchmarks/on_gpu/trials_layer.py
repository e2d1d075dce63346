"""Rows of awkward sizes: what `benchmarks.gpu` checks of norms, the gate, and the product behind a norm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from benchmarks.on_gpu.trial import Guarded, Trial, TrialCase, normal, poison
from engine.kernels.add_rms_norm import add_rms_norm_launch, add_rms_norm_reference
from engine.kernels.choices import Choices
from engine.kernels.embed_rms_norm_qkv import embed_rms_norm_qkv_launch
from engine.kernels.gated_activation import (
    ACTIVATIONS,
    gated_activation_launch,
    gated_activation_reference,
)

_EPS = 1e-5
_VOCAB_SIZE = 500
# Tokens and width; for the qkv product outputs as well.
_ROWS = ((1, 4096), (63, 4096), (17, 2560), (257, 3584), (16, 60))
_TINY_ROWS = ((1, 60), (3, 32))
_PRODUCTS = ((1, 4096, 6144), (15, 4096, 6144), (17, 3584, 4608), (63, 2560, 3840), (257, 4096, 6144))
_TINY_PRODUCTS = ((1, 60, 40), (17, 32, 48))


def layer_cases(*, is_tiny: bool) -> Iterator[TrialCase]:
    """Every size in both types."""
    dtypes = (torch.float32, torch.float16) if is_tiny else (torch.float16, torch.bfloat16)
    for dtype in dtypes:
        words = str(dtype).removeprefix("torch.")
        for num_tokens, width in _TINY_ROWS if is_tiny else _ROWS:
            size = (num_tokens, width)
            for has_delta, has_norm in ((False, False), (True, False), (True, True)):
                yield TrialCase(
                    kernel="add_rms_norm",
                    name=f"{num_tokens} x {width}, {words}, delta {has_delta}, its norm {has_norm}",
                    make=partial(_add_trial, size, dtype, has_delta, has_norm),
                )
            for activation in ACTIVATIONS:
                yield TrialCase(
                    kernel="gated_activation",
                    name=f"{num_tokens} x {width}, {words}, {activation}",
                    make=partial(_gate_trial, size, dtype, activation),
                )
        for index, sizes in enumerate(_TINY_PRODUCTS if is_tiny else _PRODUCTS):
            yield TrialCase(
                kernel="embed_rms_norm_qkv",
                name="{} x {} x {}, ".format(*sizes) + f"{words}, bias {bool(index % 2)}",
                make=partial(_embed_trial, sizes, dtype, bool(index % 2)),
            )


def _add_trial(
    size: tuple[int, int], dtype: torch.dtype, has_delta: bool, has_norm: bool, device: torch.device
) -> Trial:
    hidden, out = Guarded(size, torch.float32, device), Guarded(size, dtype, device)
    before_TD = normal(*size, dtype=torch.float32, device=device)
    delta_TD = normal(*size, dtype=dtype, device=device) if has_delta else None
    weight_D, delta_weight_D = (normal(size[1], dtype=torch.float32, device=device) for _ in range(2))
    delta_norm_D = delta_weight_D if has_norm else None

    def run(choices: Choices) -> None:
        hidden.inner.copy_(before_TD)
        poison([out.inner])
        choices.run(
            add_rms_norm_launch(
                hidden.inner, delta_TD, weight_D, _EPS, out.inner, delta_weight_D=delta_norm_D
            )
        )

    def expected() -> list[torch.Tensor]:
        hidden_TD = before_TD.double()
        normed_TD = add_rms_norm_reference(
            hidden_TD, delta_TD, weight_D.double(), _EPS, delta_weight_D=delta_norm_D, dtype=torch.float64
        )
        return [normed_TD, hidden_TD]

    return Trial(
        run=run,
        outputs=lambda: [out.inner, hidden.inner],
        expected=expected,
        guards=[hidden.is_intact, out.is_intact],
    )


def _gate_trial(size: tuple[int, int], dtype: torch.dtype, activation: str, device: torch.device) -> Trial:
    num_tokens, width = size
    gate_up_T2F = normal(num_tokens, 2 * width, dtype=dtype, device=device, deviation=3.0)
    out = Guarded(size, dtype, device)

    def run(choices: Choices) -> None:
        poison([out.inner])
        choices.run(gated_activation_launch(gate_up_T2F, activation, out.inner))

    return Trial(
        run=run,
        outputs=lambda: [out.inner],
        expected=lambda: [gated_activation_reference(gate_up_T2F.float(), activation)],
        guards=[out.is_intact],
    )


def _embed_trial(
    sizes: tuple[int, int, int], dtype: torch.dtype, has_bias: bool, device: torch.device
) -> Trial:
    num_tokens, width, num_outputs = sizes
    token_ids_T = torch.arange(num_tokens, device=device) * 7919 % _VOCAB_SIZE
    embedding_VD = normal(_VOCAB_SIZE, width, dtype=dtype, device=device)
    weight_D = normal(width, dtype=torch.float32, device=device)
    qkv_OD = normal(num_outputs, width, dtype=dtype, device=device, deviation=width**-0.5)
    bias_O = normal(num_outputs, dtype=dtype, device=device) if has_bias else None
    hidden = Guarded((num_tokens, width), torch.float32, device)
    qkv = Guarded((num_tokens, num_outputs), dtype, device)

    def run(choices: Choices) -> None:
        poison([hidden.inner, qkv.inner])
        choices.run(
            embed_rms_norm_qkv_launch(
                token_ids_T, embedding_VD, weight_D, _EPS, qkv_OD, bias_O, hidden.inner, qkv.inner
            )
        )

    def expected() -> list[torch.Tensor]:
        hidden_TD = embedding_VD[token_ids_T].double()
        normed_TD = functional.rms_norm(hidden_TD, weight_D.shape, weight_D.double(), _EPS)
        bias = None if bias_O is None else bias_O.double()
        return [functional.linear(normed_TD, qkv_OD.double(), bias), hidden_TD]

    return Trial(
        run=run,
        outputs=lambda: [qkv.inner, hidden.inner],
        expected=expected,
        guards=[hidden.is_intact, qkv.is_intact],
    )
