"""Whether the fused pass computes what the plain one does, on a few layers of `benchmarks.gpu`'s model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from benchmarks.on_gpu.batches import uniform_batch
from benchmarks.on_gpu.section import GpuRow
from benchmarks.on_gpu.transfer_model import ModelSize, make_runner
from engine.batch import Int64Array
from engine.kernels.choices import Choices
from engine.kernels.model_launches import Step
from engine.kv_cache import KVCache
from engine.model.decoder import Decoder
from engine.model.forward_pass import DecoderWeights, ForwardPass
from engine.model.fused_pass import FusedPass
from engine.model.layer import LayerWeights, Mlp, Projection
from engine.model.plain_pass import PlainPass
from engine.runner import ModelRunner

# Enough layers for an error to grow.
_CHECKED_LAYERS = 4
_CHECKED_PROMPT, _CHECKED_TOKENS = 100, 8
# Relative errors: of fp32 sums in another order, and what no half-precision model of so few layers has.
_SAME, _MOST_OFF = 1e-5, 0.1
_TINY_PROMPT, _TINY_TOKENS = 9, 2
# What the checks compute in fp32.
CHECKED_STEPS = (
    Step(num_sequences=1, new_tokens=_CHECKED_PROMPT, context=_CHECKED_PROMPT),
    Step(num_sequences=1, new_tokens=1, context=_CHECKED_PROMPT + _CHECKED_TOKENS - 1),
)


def agreement(size: ModelSize, choices: Choices, device: torch.device) -> Iterator[GpuRow]:
    """The fused pass against the plain one, on a few layers of the model: tokens in fp32, logits in its own.

    In the model's dtype both are off from fp32, by their roundings; the fused one may be off by half more.
    """
    num_layers = min(_CHECKED_LAYERS, size.config.num_layers)
    few = replace(size, settings={**size.settings, "num_hidden_layers": num_layers})
    model = _Agreeing(few, choices, device)
    errors = model.errors()
    is_close = errors["fused"] <= 1.5 * errors["plain"] + _SAME and errors["plain"] < _MOST_OFF
    words = "fused off by {fused:.3g}, plain by {plain:.3g}".format(**errors)
    yield GpuRow.check(
        f"fused as plain, {str(few.dtype).removeprefix('torch.')} logits",
        [] if is_close else [words],
        passed=int(is_close),
        also={f"{name} error": error for name, error in errors.items()},
    )
    pairs = list(zip(*model.exact_tokens(), strict=True))
    faults = [
        f"{fused}, not {plain}, as token {n}" for n, (fused, plain) in enumerate(pairs) if fused != plain
    ]
    yield GpuRow.check("fused as plain, fp32 tokens", faults, passed=len(pairs) - len(faults))


class _Agreeing:
    """One model, and the same in fp32, with both passes and one prompt."""

    def __init__(self, size: ModelSize, choices: Choices, device: torch.device) -> None:
        is_tiny = device.type == "cpu"
        self._prompt = _TINY_PROMPT if is_tiny else _CHECKED_PROMPT
        self._count = _TINY_TOKENS if is_tiny else _CHECKED_TOKENS
        self._runner = make_runner(size, self._prompt + self._count + size.block_size, device)
        exact = Decoder(size.config, _widened(self._runner.model.weights))
        shape = replace(self._runner.cache.shape, dtype=torch.float32)
        self._exact = ModelRunner(exact, KVCache(shape, device))
        self._plain: ForwardPass = PlainPass(size.config)
        self._fused: ForwardPass = FusedPass(size.config, choices)
        # Its kernels are other programs, and were not measured.
        self._exact_fused: ForwardPass = FusedPass(size.config, Choices())

    def errors(self) -> dict[str, float]:
        """Of both passes' logits behind the prompt, beside those of fp32, by their norms."""
        expected = self._logits(self._exact, self._plain)
        return {
            name: float((self._logits(self._runner, each) - expected).norm() / expected.norm())
            for name, each in (("fused", self._fused), ("plain", self._plain))
        }

    def exact_tokens(self) -> tuple[list[int], list[int]]:
        """Greedy ones behind the prompt, in fp32: of the fused pass, and of the plain one."""
        return self._tokens(self._exact_fused), self._tokens(self._plain)

    def _tokens(self, forward_pass: ForwardPass) -> list[int]:
        self._exact.model.forward_pass = forward_pass
        token_ids: list[int] = self._prompt_ids().tolist()
        for new_tokens in (len(token_ids), *([1] * (self._count - 1))):
            step = Step(num_sequences=1, new_tokens=new_tokens, context=len(token_ids))
            batch = uniform_batch(step, self._exact, np.array(token_ids[-new_tokens:]), is_in_order=True)
            token_ids.append(int(self._exact.run(batch).token_ids[0]))
        return token_ids[self._prompt :]

    def _logits(self, runner: ModelRunner, forward_pass: ForwardPass) -> torch.Tensor:
        runner.model.forward_pass = forward_pass
        step = Step(num_sequences=1, new_tokens=self._prompt, context=self._prompt)
        return runner.logits(uniform_batch(step, runner, self._prompt_ids(), is_in_order=True))

    def _prompt_ids(self) -> Int64Array:
        return np.random.default_rng(5).integers(0, self._exact.model.config.vocab_size, self._prompt)


def _widened(weights: DecoderWeights) -> DecoderWeights:
    """The same numbers in fp32. Of a model without biases and experts."""

    def wide(projection: Projection) -> Projection:
        return Projection(weight=projection.weight.float())

    def wide_layer(layer: LayerWeights) -> LayerWeights:
        assert isinstance(layer.mlp, Mlp)
        mlp = replace(layer.mlp, gate_up=wide(layer.mlp.gate_up), down=wide(layer.mlp.down))
        return replace(layer, qkv=wide(layer.qkv), output=wide(layer.output), mlp=mlp)

    return replace(
        weights,
        embedding=weights.embedding.float(),
        layers=[wide_layer(layer) for layer in weights.layers],
        head=weights.head.float(),
    )
