"""Which pass an engine gets."""

from __future__ import annotations

import dataclasses

import pytest
import triton

from baton.errors import ConfigError
from engine.config import EngineConfig
from engine.load import load_engine
from engine.model.fused_pass import FusedPass
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


def test_compiled_layers_and_kernels_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        dataclasses.replace(SMALL, kernels="triton", compile=True)
