"""Which way an engine runs its layers: plain torch, or kernels. Decided once, when it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from baton.errors import ConfigError
from engine.model.plain_pass import PlainPass

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.kv_cache import CacheShape
    from engine.model.decoder import Decoder
    from engine.model.forward_pass import ForwardPass


def choose_pass(config: EngineConfig, model: Decoder, cache: CacheShape) -> ForwardPass:
    """The pass that config.kernels asks for; on a GPU kernels are measured, or their measurements read.

    cache: of the engine; its number of blocks does not matter. Call it before the cache is allocated.
    Raises ConfigError for kernels of another device (a CPU only runs a GPU's interpreted, for tests), and of
    other types than they compute: a GPU's compute no float32, of which tiles fit no registers.
    """
    on_gpu = model.device.type == "cuda"
    if config.kernels == "numba" or (config.kernels == "auto" and model.device.type == "cpu"):
        return _on_cpu(config, model, cache)
    is_fp32 = torch.float32 in (model.dtype, cache.dtype)
    suits = on_gpu and not is_fp32 and not config.compile
    if config.kernels == "torch" or (config.kernels == "auto" and not suits):
        return PlainPass(model.config)
    if on_gpu and is_fp32:
        raise ConfigError(
            f"kernels is triton, weights are {model.dtype} and the cache is {cache.dtype}; on a GPU kernels "
            f"need 16 bits of both: set dtype and kv_dtype to bfloat16, or kernels to torch",
            field="kernels",
        )
    # Triton takes a second to import, and does not exist everywhere.
    import triton  # noqa: PLC0415

    from engine.kernels.choices import UNMEASURED  # noqa: PLC0415
    from engine.kernels.model_tuning import tune_model  # noqa: PLC0415
    from engine.model.fused_pass import FusedPass  # noqa: PLC0415

    if on_gpu:
        return FusedPass(model.config, tune_model(model.config, cache, model.dtype, model.device))
    if not triton.knobs.runtime.interpret:
        raise ConfigError(
            f"kernels is triton and device is {config.device}; kernels need a GPU: set kernels to auto",
            field="kernels",
        )
    return FusedPass(model.config, UNMEASURED)


def _on_cpu(config: EngineConfig, model: Decoder, cache: CacheShape) -> PlainPass:
    """Kernels where they suit: in bfloat16, or if they were asked for."""
    # Imports numba.
    from engine.cpu.choice import kernel_pass, why_not  # noqa: PLC0415

    if config.kernels == "auto" and (model.dtype != torch.bfloat16 or config.compile):
        return PlainPass(model.config)
    reason = why_not(model.dtype, cache.dtype)
    if model.device.type != "cpu":
        reason = f"device is {config.device}, and these are for CPUs"
    if not reason:
        return kernel_pass(model.config, model.dtype)
    if config.kernels == "numba":
        raise ConfigError(f"kernels is numba, and {reason}; set kernels to auto", field="kernels")
    return PlainPass(model.config)
