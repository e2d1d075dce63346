"""A Triton function with the ways it may be run, and one call of it, for a device or for a compiler.

A call is data (Launch) before it is run: so the same call that an operator makes on a device can be
compiled ahead of time for another one, with the signature and the attributes that Triton's dispatcher
derives from its arguments. Which configuration is taken is engine/kernels/choices.py's business.

Knows no model. Under TRITON_INTERPRET=1, set before triton is imported, everything runs on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Products and sums may be contracted into one operation, as on every backend by default; said here because
# the compiler asks for it to be said.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import create_function_from_signature

Grid = tuple[int, ...]
# What a choice of configuration hangs on: names and values, such as head_dim and a bucket of lengths.
# A model's calls of one shape are one program in each configuration.
Shape = tuple[tuple[str, int | str], ...]


def type_name(tensor: torch.Tensor) -> str:
    """Of its elements, for a shape."""
    return str(tensor.dtype).removeprefix("torch.")


def bucket(number: int, sizes: Sequence[int]) -> int:
    """The first of rising sizes that is no less, or else the last: numbers that share a choice."""
    return next((size for size in sizes if number <= size), sizes[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One way to run a kernel. constants: its tile sizes, by the names of the function's constexprs."""

    constants: Mapping[str, int]
    num_warps: int
    num_stages: int = 1

    def __str__(self) -> str:
        sizes = [f"{name}={value}" for name, value in self.constants.items()]
        return " ".join([*sizes, f"warps={self.num_warps}", f"stages={self.num_stages}"])


def _all(_shape: Mapping[str, int | str], _config: Config) -> bool:
    return True


def _none(_constants: Mapping[str, int]) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A Triton function and its declared configurations, the one for unmeasured devices first.

    accepts: whether a configuration makes sense for a shape.
    """

    name: str
    function: Any
    configs: tuple[Config, ...]
    accepts: Callable[[Mapping[str, int | str], Config], bool] = _all

    def configs_for(self, shape: Shape) -> tuple[Config, ...]:
        """The configurations for a shape, never none."""
        accepted = tuple(config for config in self.configs if self.accepts(dict(shape), config))
        if not accepted:
            raise ValueError(f"{self.name} declares no configuration for {dict(shape)}")
        return accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One call of a kernel.

    arguments: the function's runtime arguments, by name: tensors and numbers.
    constants: constexprs that the problem fixes, by name; those of the configuration come on top.
    grid: programs, given the configuration's constants.
    shape: what the choice of configuration hangs on.
    arguments_for: runtime arguments that follow from the configuration's constants, such as tables by tile.
    """

    kernel: Kernel
    grid: Callable[[Mapping[str, int]], Grid]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    shape: Shape
    arguments_for: Callable[[Mapping[str, int]], Mapping[str, Any]] = _none

    def run(self, config: Config) -> None:
        """Runs it on the device of its tensors; nothing if the grid is empty."""
        grid = self.grid(config.constants)
        if all(grid):
            self.kernel.function[grid](**self._bound(config))

    def load(self, config: Config) -> None:
        """Compiles it for the current device, and loads it there, so that run() has only to launch it.

        Runs nothing: tensors may be on the meta device. What Triton's cache on disk has is read from there.
        Raises what the compiler and the driver do.
        """
        compiled = self.kernel.function.warmup(grid=(1,), **self._bound(config))
        # None where a hook of Triton's has kept it from being compiled.
        if compiled is not None:
            compiled._init_handles()

    def compile(self, target: GPUTarget, config: Config) -> CompiledKernel:
        """Machine code for a device that need not be there; tensors may be on the meta device."""
        source, options = self.source(target, config)
        return triton.compile(source, target=target, options=options)

    def source(self, target: GPUTarget, config: Config) -> tuple[ASTSource, dict[str, Any]]:
        """What the compiler is given, and its options.

        Types, alignments and constants are derived by the dispatcher's own code.
        """
        function, backend = self.kernel.function, make_backend(target)
        binder = create_function_from_signature(function.signature, function.params, backend)
        bound, specialization, extra = binder(**self._bound(config))
        options, signature, constexprs, attributes = function._pack_args(
            backend, dict(extra), bound, specialization, extra
        )
        return ASTSource(function, signature, constexprs, attributes), options.__dict__

    def _bound(self, config: Config) -> dict[str, Any]:
        stages = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        further = self.arguments_for(config.constants)
        return {**self.arguments, **further, **self.constants, **config.constants, **stages}
