"""Fixtures of the engine's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

from tests.engine.tiny_models import Reference, save_reference

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
