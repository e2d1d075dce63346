"""A layer as machine code: engine/model/layer.py's functions, compiled once and used for all layers.

Owns the compiler's settings, its cache on disk, and the way back to eager, which nothing but a line in the
log tells of. Must not know batches, the cache of keys and values, or attention, which stays eager: it works
on the step's plan. So do the embedding, the head, and experts, whose loop hangs on what was chosen.

Weights are arguments, so one program serves every layer of the same kind. The number of tokens is dynamic;
one token alone is a program of its own, because the compiler takes sizes of 0 and 1 for constants. All is
compiled before the worker serves. What would have to be compiled later is refused by the compiler, and ends
in eager layers, rather than in a step that takes a minute.

The compiler's mode is its default: "reduce-overhead" would record a CUDA graph for each number of tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo import mark_dynamic
from torch._dynamo.exc import FailOnRecompileLimitHit, RecompileError
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.exc import InvalidCxxCompiler

from baton.logs import get_logger
from engine.model import layer
from engine.model.moe import Experts
from engine.private_folder import make_private

if TYPE_CHECKING:
    from baton.model_config import ModelConfig
    from engine.model.layer import LayerWeights

# The compiler takes the number of tokens that it sees first for the usual one.
_USUAL_TOKENS = 128
# What a compiler without a tool, without room or with a defect raises; torch wraps most of it in the first.
_FAILURES = (RuntimeError, OSError, ImportError, FailOnRecompileLimitHit)
_NO_COMPILER = "install g++, or let CXX name a C++ compiler; or start without --compile"
_OTHERWISE = "start without --compile"

ResultT = TypeVar("ResultT")

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What compiling came to. is_cached: every program was on disk already."""

    num_programs: int
    is_cached: bool


class CompiledLayer:
    """engine.model.layer.LayerCode in machine code; eager before compile(), and wherever it cannot be used.

    folder: of the programs on disk; it is made. Several processes may share it.
    backend: torch.compile's.
    """

    def __init__(self, folder: Path, *, backend: str | Callable[..., Any] = "inductor") -> None:
        self._folder = folder
        self._project = torch.compile(layer.project, fullgraph=True, backend=backend)
        self._finish = torch.compile(layer.finish, fullgraph=True, backend=backend)
        self._attention_added = torch.compile(layer.attention_added, fullgraph=True, backend=backend)
        self._is_compiling = False
        self.is_eager = True

    def compile(self, run: Callable[[int], object]) -> Compilation | None:
        """Compiles for one token and for several, or reads that from the disk.

        run: computes a step of so many tokens, or of fewer where it has no room.
        Returns None where that fails: layers stay eager then, and a warning says why.
        """
        before = _counts()
        self._is_compiling, self.is_eager = True, False
        try:
            _use_folder(self._folder)
            with dynamo_config.patch(error_on_recompile=False):
                run(_USUAL_TOKENS)
                run(1)
        except _FAILURES as error:
            self._fall_back(error, _remedy(error))
            return None
        finally:
            self._is_compiling = False
        # For the whole process: it serves now.
        dynamo_config.error_on_recompile = True
        programs, hits, misses = (after - then for after, then in zip(_counts(), before, strict=True))
        return Compilation(num_programs=programs, is_cached=hits > 0 and not misses)

    def project(
        self,
        hidden_TD: torch.Tensor,
        weights: LayerWeights,
        config: ModelConfig,
        cos_T1h: torch.Tensor,
        sin_T1h: torch.Tensor,
    ) -> torch.Tensor:
        """engine.model.layer.project()."""
        return self._call(self._project, layer.project, hidden_TD, weights, config, cos_T1h, sin_T1h)

    def finish(
        self, hidden_TD: torch.Tensor, attended_TA: torch.Tensor, weights: LayerWeights, config: ModelConfig
    ) -> torch.Tensor:
        """engine.model.layer.finish()."""
        if not isinstance(weights.mlp, Experts):
            return self._call(self._finish, layer.finish, hidden_TD, attended_TA, weights, config)
        hidden_TD, x_TD = self._call(
            self._attention_added, layer.attention_added, hidden_TD, attended_TA, weights, config
        )
        return layer.mlp_added(hidden_TD, x_TD, weights, config)

    def _call(self, compiled: Callable[..., ResultT], eager: Callable[..., ResultT], *args: Any) -> ResultT:
        """args: the first dimension of every tensor counts tokens."""
        num_tokens = len(args[0])
        # No tokens: the last layer of a step that samples nothing.
        if self.is_eager or not num_tokens:
            return eager(*args)
        if self._is_compiling and num_tokens > 1:
            for tensor in args:
                if isinstance(tensor, torch.Tensor):
                    mark_dynamic(tensor, 0)
        try:
            return compiled(*args)
        except RecompileError as error:
            self._fall_back(error, f"{_OTHERWISE}; answers are the same")
            return eager(*args)

    def _fall_back(self, error: BaseException, remedy: str) -> None:
        self.is_eager = True
        reason = str(_innermost(error)).strip()
        log.warning("layers are not compiled", reason=reason or type(error).__name__, remedy=remedy)


def _use_folder(folder: Path) -> None:
    """Makes the folder the compiler's cache; raises OSError if that would not be safe.

    Who can write there can run code here: the cache holds libraries that are loaded.
    """
    make_private(folder)
    # The compiler takes it from nowhere else.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    # Workers share the cores, and there are four programs: a pool of compiling processes is of no use.
    inductor_config.compile_threads = 1


def _counts() -> tuple[int, int, int]:
    """Of this process: programs compiled or read, those found on disk, and those not found there."""
    inductor = counters["inductor"]
    return (
        counters["stats"]["unique_graphs"],
        inductor["fxgraph_cache_hit"],
        inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
    )


def _innermost(error: BaseException) -> BaseException:
    while (cause := error.__cause__ or getattr(error, "inner_exception", None)) is not None:
        error = cause
    return error


def _remedy(error: BaseException) -> str:
    is_missing = isinstance(_innermost(error), InvalidCxxCompiler | FileNotFoundError)
    return _NO_COMPILER if is_missing else _OTHERWISE
