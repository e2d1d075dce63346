"""Which pass an engine gets."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from baton.errors import ConfigError
from engine.config import EngineConfig
from engine.kernels.choices import UNMEASURED
from engine.kv_cache import CacheShape
from engine.load import load_engine
from engine.model.forward_pass import ForwardPass
from engine.model.fused_pass import FusedPass
from engine.model.pass_choice import choose_pass
from engine.model.plain_pass import PlainPass
from engine.runner import ModelRunner
from tests.engine.tiny_models import Families

SMALL = EngineConfig(kv_cache_bytes=1 << 20, block_size=4, max_running=4)


def load(family_model: Families, kernels: str) -> ModelRunner:
    folder, _ = family_model("llama tied")
    return load_engine(dataclasses.replace(SMALL, model=str(folder), kernels=kernels))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_cpu_computes_in_plain_torch(family_model: Families, kernels: str) -> None:
    assert isinstance(load(family_model, kernels).model.forward_pass, PlainPass)


def test_kernels_can_be_asked_for_where_they_are_interpreted(family_model: Families) -> None:
    assert isinstance(load(family_model, "triton").model.forward_pass, FusedPass)


def test_kernels_on_a_cpu_are_refused_by_name(
    family_model: Families, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)

    with pytest.raises(ConfigError, match="kernels need a GPU") as raised:
        load(family_model, "triton")

    assert raised.value.field == "kernels"


@pytest.mark.parametrize("device", ["gpu", "cuda", "cuda:7", "meta", "cpu:x"])
def test_a_device_that_is_not_here_is_refused_by_name(
    family_model: Families, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    folder, _ = family_model("llama tied")
    with pytest.raises(ConfigError, match=f"device is '{device}'") as raised:
        load_engine(dataclasses.replace(SMALL, model=str(folder), device=device))
    assert raised.value.field == "device"


FP32, BF16 = torch.float32, torch.bfloat16


def on_gpu(
    kernels: str, dtype: torch.dtype, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> ForwardPass:
    """The pass of a model on a GPU, whose kernels are not measured."""
    monkeypatch.setattr("engine.kernels.model_tuning.tune_model", lambda *_: UNMEASURED)
    model: Any = SimpleNamespace(config=None, device=torch.device("cuda"), dtype=dtype)
    cache = CacheShape(num_blocks=1, num_layers=1, num_kv_heads=1, block_size=16, head_dim=8, dtype=kv_dtype)
    return choose_pass(EngineConfig(device="cuda", kernels=kernels), model, cache)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(FP32, FP32), (FP32, BF16), (BF16, FP32)])
def test_float32_on_a_gpu_is_not_for_kernels(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    assert isinstance(on_gpu("auto", dtype, kv_dtype, monkeypatch), PlainPass)
    with pytest.raises(ConfigError, match="need 16 bits") as raised:
        on_gpu("triton", dtype, kv_dtype, monkeypatch)
    assert raised.value.field == "kernels"
    assert isinstance(on_gpu("auto", BF16, torch.float16, monkeypatch), FusedPass)


def test_compiled_layers_and_kernels_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        dataclasses.replace(SMALL, kernels="triton", compile=True)
