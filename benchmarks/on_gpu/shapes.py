"""Sizes that `benchmarks.gpu` measures: Llama-3.1-8B's, with steps of a worker; tiny ones on a CPU."""

from __future__ import annotations

import torch

from benchmarks.on_gpu.transfer_model import SIZES, ModelSize
from engine.kernels.model_launches import Step

LLAMA_8B = SIZES["llama-8b"]
_INTERPRETED = SIZES["interpreted"]


def _prefill(num_tokens: int) -> Step:
    return Step(num_sequences=1, new_tokens=num_tokens, context=num_tokens)


def _decode(num_sequences: int, context: int) -> Step:
    return Step(num_sequences=num_sequences, new_tokens=1, context=context)


# Of kernels alone. What the short table has comes first: time may run out.
STEPS = (
    _prefill(2048),
    _decode(128, 4096),
    _decode(32, 1024),
    _prefill(8192),
    _decode(1, 4096),
    _decode(1, 1024),
    _prefill(256),
    _decode(128, 1024),
    _decode(32, 4096),
)
# Of the whole model, likewise.
MODEL_STEPS = (
    _prefill(2048),
    _decode(1, 1024),
    _decode(128, 4096),
    _decode(32, 1024),
    _decode(128, 1024),
    _prefill(8192),
    _prefill(256),
    _prefill(1024),
    _decode(8, 1024),
    _prefill(128),
)
# Beside torch.compile's.
COMPILED_STEPS = (_prefill(2048), _decode(1, 1024), _decode(32, 1024))
_TINY_STEPS = (_prefill(9), _decode(2, 5))


def model_size(device: torch.device) -> ModelSize:
    """What is computed there."""
    return LLAMA_8B if device.type == "cuda" else _INTERPRETED


def kernel_steps(device: torch.device) -> tuple[Step, ...]:
    """Steps whose kernels are measured one by one."""
    return STEPS if device.type == "cuda" else _TINY_STEPS


def model_steps(device: torch.device) -> tuple[Step, ...]:
    """Steps of the whole model."""
    return MODEL_STEPS if device.type == "cuda" else _TINY_STEPS


def compiled_steps(device: torch.device) -> tuple[Step, ...]:
    """Steps of the whole model that torch.compile's programs compute as well."""
    return COMPILED_STEPS if device.type == "cuda" else _TINY_STEPS[-1:]


def step_name(step: Step) -> str:
    """Such as "prefill 2048" or "decode 32 x 1024"."""
    if step.new_tokens > 1:
        return f"prefill {step.new_tokens}"
    return f"decode {step.num_sequences} x {step.context}"
