"""The oracle itself: what a family is known for decides its logits.

transformers only. A switch that changed nothing here could be missing from the engine unnoticed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engine.families import CLASSES, FAMILIES, FULL, GEMMA_ROPES, SLIDING, SPELLINGS, Spelling
from tests.engine.tiny_models import Families, greedy_reference, prompts_of, reference_logits

# Five times what the engine's logits may be off by.
MATTERS = 5e-4
Change = Callable[[PreTrainedModel, str], PreTrainedModel]


def with_settings(**settings: Any) -> Change:
    """The same weights under another config."""

    def change(model: PreTrainedModel, name: str) -> PreTrainedModel:
        family = FAMILIES[name]
        other = CLASSES[family.kind][1](family.config(**settings)).eval()
        other.load_state_dict(model.state_dict())
        return other

    return change


def with_modules(suffix: str, edit: Callable[[nn.Module], nn.Module | None]) -> Change:
    """A copy whose modules of this name are edited, or replaced by what `edit` returns."""

    def change(model: PreTrainedModel, _name: str) -> PreTrainedModel:
        other = copy.deepcopy(model)
        for path, module in list(other.named_modules()):
            if path.endswith(suffix) and (replacement := edit(module)) is not None:
                other.set_submodule(path, replacement)
        return other

    return change


def removed(_module: nn.Module) -> nn.Module:
    return nn.Identity()


@torch.no_grad()
def without_bias(module: nn.Module) -> None:
    module.bias.zero_()  # type: ignore[operator,union-attr]


@torch.no_grad()
def in_other_order(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.copy_(parameter.roll(1, dims=0))


def with_attribute(suffix: str, name: str, value: object) -> Change:
    return with_modules(suffix, lambda module: setattr(module, name, value))


@torch.no_grad()
def unscaled(module: nn.Module) -> None:
    module.embed_scale.fill_(1.0)  # type: ignore[operator,union-attr]


def ropes(full: Mapping[str, Any], sliding: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {FULL: dict(full), SLIDING: dict(sliding)}}


ROPES = GEMMA_ROPES["rope_parameters"]
DEFAULT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
YARN = dict(FAMILIES["llama yarn rope, head_dim 80"].settings["rope_parameters"])

CHANGES: list[tuple[str, str, Change]] = [
    ("llama biases, every head its own", "query bias", with_modules("q_proj", without_bias)),
    ("llama biases, every head its own", "key bias", with_modules("k_proj", without_bias)),
    ("llama biases, every head its own", "value bias", with_modules("v_proj", without_bias)),
    ("llama biases, every head its own", "output bias", with_modules("o_proj", without_bias)),
    ("llama biases, every head its own", "gate bias", with_modules("gate_proj", without_bias)),
    ("llama biases, every head its own", "up bias", with_modules("up_proj", without_bias)),
    ("llama biases, every head its own", "down bias", with_modules("down_proj", without_bias)),
    ("llama3 rope, three shards", "llama3 rope", with_settings(**DEFAULT_ROPE)),
    ("llama linear rope", "linear rope", with_settings(**DEFAULT_ROPE)),
    ("llama yarn rope, head_dim 80", "yarn rope", with_settings(**DEFAULT_ROPE)),
    (
        "llama yarn rope, head_dim 80",
        "attention factor",
        with_settings(rope_parameters=YARN | {"attention_factor": 1.0}),
    ),
    ("mistral window", "window", with_settings(sliding_window=None)),
    ("mistral window", "window's last token", with_settings(sliding_window=9)),
    ("ministral window by layer", "which layers have a window", with_settings(layer_types=[SLIDING] * 3)),
    ("ministral window by layer", "window", with_settings(layer_types=[FULL] * 3)),
    ("qwen2", "query bias", with_modules("q_proj", without_bias)),
    ("qwen2", "key bias", with_modules("k_proj", without_bias)),
    ("qwen2", "value bias", with_modules("v_proj", without_bias)),
    ("qwen2 window from layer 1", "max_window_layers", with_settings(max_window_layers=0)),
    ("qwen2 window from layer 1", "use_sliding_window", with_settings(use_sliding_window=False)),
    ("qwen3 head_dim 80 of hidden 60", "query norm", with_modules("q_norm", removed)),
    ("qwen3 head_dim 80 of hidden 60", "key norm", with_modules("k_norm", removed)),
    ("qwen3 head_dim 80 of hidden 60", "scale", with_attribute("self_attn", "scaling", 20**-0.5)),
    ("qwen3 window by layer, biases", "window", with_settings(layer_types=[FULL] * 3)),
    ("qwen3 window by layer, biases", "query bias", with_modules("q_proj", without_bias)),
    ("qwen3 window by layer, biases", "output bias", with_modules("o_proj", without_bias)),
    ("gemma3", "norm behind attention", with_modules("post_attention_layernorm", removed)),
    ("gemma3", "norm before the MLP", with_modules("pre_feedforward_layernorm", removed)),
    ("gemma3", "norm behind the MLP", with_modules("post_feedforward_layernorm", removed)),
    ("gemma3", "query norm", with_modules("q_norm", removed)),
    ("gemma3", "key norm", with_modules("k_norm", removed)),
    ("gemma3", "embedding scale", with_modules("embed_tokens", unscaled)),
    ("gemma3", "gelu", with_attribute("mlp", "act_fn", nn.SiLU())),
    ("gemma3 untied, biases", "gelu by tanh", with_attribute("mlp", "act_fn", nn.GELU())),
    ("gemma3", "window", with_settings(layer_types=[FULL] * 3)),
    ("gemma3", "query_pre_attn_scalar", with_settings(query_pre_attn_scalar=20)),
    ("gemma3", "global rope", with_settings(**ropes(ROPES[SLIDING], ROPES[SLIDING]))),
    ("gemma3", "local rope", with_settings(**ropes(ROPES[FULL], ROPES[FULL]))),
    ("gemma3 untied, biases", "key bias", with_modules("k_proj", without_bias)),
    ("mixtral", "router", with_modules("mlp.gate", in_other_order)),
    ("mixtral", "experts", with_modules("mlp.experts", in_other_order)),
    ("mixtral", "second expert", with_attribute("mlp.gate", "top_k", 1)),
    ("mixtral window", "window", with_settings(sliding_window=None)),
    ("qwen3 moe, dense middle", "router", with_modules("mlp.gate", in_other_order)),
    ("qwen3 moe, dense middle", "second expert", with_attribute("mlp.gate", "top_k", 1)),
    ("qwen3 moe, dense middle", "norm_topk_prob", with_settings(norm_topk_prob=False)),
    ("qwen3 moe, every second sparse, window", "norm_topk_prob", with_settings(norm_topk_prob=True)),
    ("qwen3 moe, every second sparse, window", "window", with_settings(use_sliding_window=False)),
    ("qwen3 moe, every second sparse, window", "value bias", with_modules("v_proj", without_bias)),
]


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name, _, change in CHANGES],
    ids=[f"{name}: {what}" for name, what, _ in CHANGES],
)
def test_what_a_family_is_known_for_changes_its_logits(
    family_model: Families, name: str, change: Change
) -> None:
    _, reference = family_model(name)
    (prompt,) = prompts_of(41)

    changed = reference_logits(change(reference, name), prompt)

    assert (changed - reference_logits(reference, prompt)).abs().max() > MATTERS


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_no_near_ties_and_do_not_repeat_themselves(
    family_model: Families, name: str
) -> None:
    _, reference = family_model(name)
    seen: set[int] = set()
    for prompt in prompts_of(5, 31, 64):
        seen.update(greedy_reference(reference, prompt, 32)[len(prompt) :])
    assert len(seen) > 15


@pytest.mark.parametrize("name", [name for name in FAMILIES if "mixtral" in name or "moe" in name])
def test_every_expert_is_somebodys(family_model: Families, name: str) -> None:
    _, reference = family_model(name)
    chosen: dict[str, set[int]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _module, _inputs, output, path=path: chosen.setdefault(path, set()).update(
                output[-1].flatten().tolist()
            )
        )
        for path, module in reference.named_modules()
        if path.endswith("mlp.gate")
    ]

    for prompt in prompts_of(1, 37, 4, 63, 2):
        reference_logits(reference, prompt)
    for hook in hooks:
        hook.remove()

    num_experts = reference.config.num_local_experts
    assert list(chosen.values()) == [set(range(num_experts))] * len(hooks)
    assert len(hooks) >= 1


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_transformers_reads_older_spellings_as_the_same_model(spelling: Spelling, tmp_path: Path) -> None:
    model = spelling.family.save(tmp_path)
    spelling.write(tmp_path)
    (prompt,) = prompts_of(41)

    reread = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)

    assert torch.equal(reference_logits(reread, prompt), reference_logits(model, prompt))
