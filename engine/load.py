"""Loads what a worker runs: weights, a way to compute the layers, and a cache, as one runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from baton.architectures import TATTLE_TALE
from baton.errors import ConfigError
from baton.logs import get_logger
from baton.models import ModelDir
from baton.rope_config import DUAL_CHUNK
from engine.cache_plan import one_block, plan_cache
from engine.host_memory import keep_freed_memory
from engine.kv_cache import KVCache, available_bytes
from engine.model.loading import load_decoder
from engine.model.packed import suits_packing
from engine.model.pass_choice import choose_pass
from engine.model.tattletale import TattleTaleRunner
from engine.model.weights import Checkpoint
from engine.runner import ModelRunner

if TYPE_CHECKING:
    from baton.model_config import ModelConfig
    from engine.config import EngineConfig
    from engine.load_log import LoadLog

log = get_logger(__name__)


def load_runner(
    config: EngineConfig, model_dir: ModelDir, *, progress: LoadLog | None = None
) -> ModelRunner | TattleTaleRunner:
    """What a worker runs: load_engine(), or the tattle-tale, which has no weights to load."""
    model = model_dir.model_config
    if model.architecture != TATTLE_TALE.name:
        return load_engine(config, model_dir, progress=progress)
    cache = allocate_cache(config, model, torch_dtype(config.dtype) or torch.float32)
    return TattleTaleRunner(cache, model.vocab_size)


def load_engine(
    config: EngineConfig, model_dir: ModelDir | None = None, *, progress: LoadLog | None = None
) -> ModelRunner:
    """Loads weights and allocates the cache. Call it on the thread that will run the steps.

    model_dir: the opened folder of config.model, if the caller has it already.
    progress: hears how far the weights are.
    Raises ModelError for the checkpoint, ConfigError for a cache that does not fit.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    device = _device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    elif device.index is not None:
        # Kernels are launched on the thread's current device, whatever the device of their tensors.
        torch.cuda.set_device(device)
    model_dir = model_dir or ModelDir.open(config.model)
    model_config = model_dir.model_config
    if model_dir.config.get(DUAL_CHUNK) is not None:
        log.warning(
            "dual chunk attention is not supported; sequences are no longer than it needs none",
            max_model_len=model_config.max_model_len,
        )
    dtype = torch_dtype(config.dtype)
    checkpoint = Checkpoint(model_dir.weights_files, device=config.device, dtype=dtype, report=progress)
    # Kernels and compiled layers read rows.
    reads_rows = config.compile or config.kernels == "triton"
    packs = not reads_rows and suits_packing(device, checkpoint.dtype)
    model = load_decoder(model_config, checkpoint, packs=packs)
    if progress is not None:
        progress.finish(dtype=str(model.dtype).removeprefix("torch."))
    kv_dtype = torch_dtype(config.kv_dtype) or model.dtype
    model.forward_pass = choose_pass(config, model, one_block(config, model_config, kv_dtype))
    cache = allocate_cache(config, model_config, model.dtype)
    return ModelRunner(model, cache, debug_nonfinite=config.debug_nonfinite)


def _device(name: str) -> torch.device:
    """Raises ConfigError for a device that torch does not know, or that is not here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}; it must be cpu, cuda or cuda:N", field="device") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; it must be cpu, cuda or cuda:N", field="device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {name!r}, and torch sees {torch.cuda.device_count()} GPUs here; set device to cpu, "
            "or install a build of torch for them",
            field="device",
        )
    return device


def allocate_cache(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> KVCache:
    """The cache of an engine, in kv_dtype (auto: dtype). Call it once the weights are loaded."""
    kv_dtype = torch_dtype(config.kv_dtype) or dtype
    shape = plan_cache(config, model, kv_dtype, available_bytes(torch.device(config.device)))
    return KVCache(shape, config.device)


def torch_dtype(name: str) -> torch.dtype | None:
    """The dtype of a name in engine.config.DTYPES; None for "auto"."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(name)
