"""Tunes the kernels that a model needs on a device, at its first start there.

Joins the model's calls, the device's timer and the folder of what earlier starts measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from baton.cache import cache_dir
from baton.model_config import ModelConfig
from engine.kernels.choices import Choices
from engine.kernels.contests import model_contests
from engine.kernels.environment import Environment
from engine.kernels.kernel import Launch
from engine.kernels.measurement_store import MeasurementStore
from engine.kernels.model_launches import Step, model_launches
from engine.kernels.timing import Timer, event_timer
from engine.kernels.tuning import tune
from engine.kv_cache import CacheShape, KVCache

# What a worker meets: prompts from long to short, several at once, and decode batches from one sequence to
# many, over short and long contexts. Kernels put what matters to them into their shapes; where lengths do
# not, the first step decides.
STEPS = (
    *(Step(num_sequences=1, new_tokens=tokens, context=tokens) for tokens in (2048, 1024, 256, 64, 16)),
    Step(num_sequences=8, new_tokens=128, context=128),
    *(Step(num_sequences=count, new_tokens=1, context=1024) for count in (1, 8, 32, 64)),
    *(Step(num_sequences=count, new_tokens=1, context=8192) for count in (1, 8)),
    # The last chunk of a prompt that has a few tokens more than whole chunks.
    Step(num_sequences=1, new_tokens=8, context=1024),
)


def tune_model(
    config: ModelConfig,
    cache: CacheShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    timer: Timer | None = None,
    steps: tuple[Step, ...] = STEPS,
) -> Choices:
    """The choices for a model on a device, measured now or read from the disk.

    cache: the model's; its number of blocks does not matter.  dtype: the weights'.
    timer: None: the device's events, which takes a GPU.
    Call it before the cache takes its share of the device's memory: calls come with data of their own.
    Raises InternalError for a kernel that does not run there.
    """
    return tune(
        _launches(config, cache, dtype, device, steps),
        model_contests(config, cache, dtype, device),
        timer=timer or event_timer(device),
        store=store_of(device),
    )


def store_of(device: torch.device) -> MeasurementStore | None:
    """Where measurements of a device are kept; None, with a warning, where they cannot be."""
    return MeasurementStore.open(cache_dir() / "kernels", Environment.of(device))


def _launches(
    config: ModelConfig,
    cache: CacheShape,
    dtype: torch.dtype,
    device: torch.device,
    steps: tuple[Step, ...],
) -> Iterator[Launch]:
    """Over caches of one layer, as large as a step needs."""
    for step in steps:
        num_blocks = step.num_sequences * -(-step.context // cache.block_size)
        own = KVCache(replace(cache, num_blocks=num_blocks, num_layers=1), device)
        yield from model_launches(config, step, own.logical, dtype)
