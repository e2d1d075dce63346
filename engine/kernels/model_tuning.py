"""Tunes the kernels that a model needs on a device, at its first start there, and loads them at every start.

Joins the model's calls, the device's timer and the folder of what earlier starts measured and compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import torch
from triton import knobs

from baton.cache import cache_dir
from baton.model_config import ModelConfig
from engine.kernels.choices import Choices
from engine.kernels.contests import model_contests
from engine.kernels.environment import Environment
from engine.kernels.kernel import Launch
from engine.kernels.measurement_store import MeasurementStore
from engine.kernels.measurements import Key
from engine.kernels.model_launches import Maker, Step, launch_makers, scatters_of_foreign_blocks
from engine.kernels.paged_attention import MAX_NEW_TOKENS
from engine.kernels.sequences import num_processors_of
from engine.kernels.timing import Timer, event_timer
from engine.kernels.tuning import loaded, tune
from engine.kv_cache import CacheShape

_PROMPTS = (2048, 1024, 256, 64, 16)
# What a worker meets: prompts from long to short, several at once, and decode batches from one sequence to
# many, over short and long contexts. Kernels put what matters to them into their shapes; where lengths do
# not, the first step decides.
STEPS = (
    *(Step(num_sequences=1, new_tokens=tokens, context=tokens) for tokens in _PROMPTS),
    Step(num_sequences=8, new_tokens=128, context=128),
    *(Step(num_sequences=count, new_tokens=1, context=1024) for count in (1, 8, 32, 64)),
    *(Step(num_sequences=count, new_tokens=1, context=8192) for count in (1, 8, 16)),
    # Many sequences, whose contexts are not split.
    *(Step(num_sequences=64, new_tokens=1, context=context) for context in (128, 2048)),
    # The last chunk of a prompt that has a few tokens more than whole chunks; a whole short prompt.
    Step(num_sequences=1, new_tokens=MAX_NEW_TOKENS, context=1024),
    Step(num_sequences=1, new_tokens=MAX_NEW_TOKENS, context=MAX_NEW_TOKENS),
)
# Not measured, but compiled: tiles of other heights, whose contexts are split, and are not.
_FURTHER_STEPS = tuple(
    Step(num_sequences=1, new_tokens=tokens, context=context)
    for tokens in (1, 2, 4, MAX_NEW_TOKENS)
    for context in (MAX_NEW_TOKENS, 1024)
)
_META = torch.device("meta")
# AMD's compiler is told of tensors that have less: a cache may, or may not.
_LARGE_BYTES = 1 << 31
# Of what peers send.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def model_steps(config: ModelConfig) -> tuple[Step, ...]:
    """STEPS, and for each of the model's windows prompts and decode batches that have outgrown it."""
    windows = [window for window in config.windows if 0 < window < config.max_model_len]
    outgrown = (
        Step(num_sequences=count, new_tokens=tokens, context=window + max(tokens, 1024))
        for window in windows
        for count, tokens in (*((1, tokens) for tokens in _PROMPTS), (8, 1))
    )
    return (*STEPS, *outgrown)


def tune_model(
    config: ModelConfig,
    cache: CacheShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    timer: Timer | None = None,
    steps: tuple[Step, ...] | None = None,
) -> Choices:
    """The choices for a model on a device, measured now or read from the disk; its kernels are loaded then.

    cache: the model's; its number of blocks does not matter.  dtype: the weights'.
    timer: None: the device's events, which takes a GPU.  steps: None: model_steps().
    Call it before the cache takes its share of the device's memory: calls come with data of their own.
    Raises InternalError for a kernel that does not run there, ConfigError where memory does not suffice.
    """
    store = store_of(device)
    # Interpreted kernels are not compiled.
    is_compiled = not knobs.runtime.interpret
    if is_compiled and store is not None:
        keep_programs(store)
    calls = _Calls(config, cache, dtype, device, model_steps(config) if steps is None else steps)
    try:
        choices = tune(
            calls.measured(),
            model_contests(config, cache, dtype, device),
            timer=timer or event_timer(device),
            store=store,
            made=calls.made,
        )
        return loaded(calls.served(), choices) if is_compiled else choices
    finally:
        if device.type == "cuda":
            # What was measured with is the cache's now.
            torch.cuda.empty_cache()


def store_of(device: torch.device) -> MeasurementStore | None:
    """Where measurements of a device are kept; None, with a warning, where they cannot be."""
    return MeasurementStore.open(cache_dir() / "kernels", Environment.of(device))


def keep_programs(store: MeasurementStore) -> None:
    """Has Triton keep what it compiles beside the measurements, unless TRITON_CACHE_DIR says where."""
    if "TRITON_CACHE_DIR" not in os.environ:
        knobs.cache.dir = str(store.path.parent / "programs")


class _Calls:
    """A model's calls: without data first, on the meta device, and with data where that is asked for."""

    def __init__(
        self,
        config: ModelConfig,
        cache: CacheShape,
        dtype: torch.dtype,
        device: torch.device,
        steps: tuple[Step, ...],
    ) -> None:
        self._config = config
        self._cache = cache
        self._dtype = dtype
        self._device = device
        self._steps = steps
        self._places: dict[Key, tuple[Step, int]] = {}

    def measured(self) -> Iterator[Launch]:
        """Of the steps, without data."""
        return self._of_steps(self._steps)

    def served(self) -> Iterator[Launch]:
        """Every program that a worker may run, without data."""
        for num_blocks in (1, -(-_LARGE_BYTES // self._cache.bytes_per_block)):
            yield from self._of_steps((*self._steps, *_FURTHER_STEPS), num_blocks)
            cache_NL2Kbh = _cache(self._cache.with_blocks(num_blocks), _META)
            yield from scatters_of_foreign_blocks(self._config, cache_NL2Kbh, _DTYPES)

    def made(self, launch: Launch) -> Launch:
        """One of measured() with data, over a cache of one layer, as large as its step needs."""
        step, place = self._places[launch.kernel.name, launch.shape]
        shape = replace(self._cache, num_blocks=self._num_blocks(step), num_layers=1)
        makers = self._makers(step, shape, self._device)
        (found,) = (made for made in makers[place]() if made.kernel is launch.kernel)
        return found

    def _of_steps(self, steps: tuple[Step, ...], num_blocks: int = 1) -> Iterator[Launch]:
        """num_blocks: of the cache, or more where the step needs more."""
        for step in steps:
            shape = self._cache.with_blocks(max(num_blocks, self._num_blocks(step)))
            for place, make in enumerate(self._makers(step, shape, _META)):
                for launch in make():
                    self._places.setdefault((launch.kernel.name, launch.shape), (step, place))
                    yield launch

    def _makers(self, step: Step, shape: CacheShape, device: torch.device) -> tuple[Maker, ...]:
        return launch_makers(
            self._config,
            step,
            _cache(shape, device),
            self._dtype,
            num_processors=num_processors_of(self._device),
        )

    def _num_blocks(self, step: Step) -> int:
        return step.num_sequences * -(-step.context // self._cache.block_size)


def _cache(shape: CacheShape, device: torch.device) -> torch.Tensor:
    """As KVCache.logical."""
    memory = torch.zeros(shape.physical, dtype=shape.dtype, device=device)
    return memory.transpose(3, 4) if shape.layout == "NHD" else memory
