"""Sizes that `benchmarks.gpu` measures: Llama-3.1-8B's, with steps of a worker; tiny ones on a CPU."""

from __future__ import annotations

import torch

from benchmarks.on_gpu.transfer_model import SIZES, ModelSize
from engine.kernels.model_launches import Step

LLAMA_8B = SIZES["llama-8b"]
_INTERPRETED = SIZES["interpreted"]

# Of kernels alone.
STEPS = (
    *(Step(num_sequences=1, new_tokens=length, context=length) for length in (256, 2048, 8192)),
    *(Step(num_sequences=count, new_tokens=1, context=1024) for count in (1, 32, 128)),
    *(Step(num_sequences=count, new_tokens=1, context=4096) for count in (1, 32, 128)),
)
# Of the whole model.
MODEL_STEPS = (
    *(Step(num_sequences=1, new_tokens=length, context=length) for length in (128, 256, 1024, 2048, 8192)),
    *(Step(num_sequences=count, new_tokens=1, context=1024) for count in (1, 8, 32, 128)),
    Step(num_sequences=128, new_tokens=1, context=4096),
)
_TINY_STEPS = (
    Step(num_sequences=1, new_tokens=9, context=9),
    Step(num_sequences=2, new_tokens=1, context=5),
)


def model_size(device: torch.device) -> ModelSize:
    """What is computed there."""
    return LLAMA_8B if device.type == "cuda" else _INTERPRETED


def kernel_steps(device: torch.device) -> tuple[Step, ...]:
    """Steps whose kernels are measured one by one."""
    return STEPS if device.type == "cuda" else _TINY_STEPS


def model_steps(device: torch.device) -> tuple[Step, ...]:
    """Steps of the whole model."""
    return MODEL_STEPS if device.type == "cuda" else _TINY_STEPS


def step_name(step: Step) -> str:
    """Such as "prefill 2048" or "decode 32 x 1024"."""
    if step.new_tokens > 1:
        return f"prefill {step.new_tokens}"
    return f"decode {step.num_sequences} x {step.context}"
