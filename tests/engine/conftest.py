"""Fixtures of the engine's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.engine.families import FAMILIES
from tests.engine.tiny_models import Families, Reference, save_reference

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference_model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Makes a checkpoint and its transformers model per set of overrides, once per session."""
    made: dict[str, tuple[Path, LlamaForCausalLM]] = {}

    def make(**overrides: Any) -> tuple[Path, LlamaForCausalLM]:
        key = json.dumps(overrides, sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp("model")
            made[key] = (folder, save_reference(folder, **overrides))
        return made[key]

    return make


@pytest.fixture(scope="session")
def family_model(tmp_path_factory: pytest.TempPathFactory) -> Families:
    """Makes a family's checkpoint and its transformers model, once per session."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def make(name: str) -> tuple[Path, PreTrainedModel]:
        if name not in made:
            folder = tmp_path_factory.mktemp("family")
            made[name] = (folder, FAMILIES[name].save(folder))
        return made[name]

    return make
