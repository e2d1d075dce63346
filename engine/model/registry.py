"""Which architectures the decoder in engine/model/decoder.py computes.

Owns the list and the switches that an architecture's name implies. An architecture
that is not listed is refused by name. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One name of config.json's `architectures` and what it implies.

    qkv_bias, output_bias: fixed by the architecture, or None where config.json's
    attention_bias decides.
    """

    name: str
    qkv_bias: bool | None = None
    output_bias: bool | None = None

    def has_qkv_bias(self, config: Mapping[str, Any]) -> bool:
        """Whether the q, k and v projections have a bias."""
        return bool(config.get("attention_bias", False)) if self.qkv_bias is None else self.qkv_bias

    def has_output_bias(self, config: Mapping[str, Any]) -> bool:
        """Whether the attention's output projection has a bias."""
        return bool(config.get("attention_bias", False)) if self.output_bias is None else self.output_bias


ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture(name="LlamaForCausalLM"),
        Architecture(name="MistralForCausalLM", qkv_bias=False, output_bias=False),
        Architecture(name="Qwen2ForCausalLM", qkv_bias=True, output_bias=False),
    )
}


# Not a language model but a probe of the way KV travels (engine/model/tattletale.py); nobody is offered it.
TATTLE_TALE = Architecture(name="TattleTaleForCausalLM")


def find_architecture(names: Sequence[str]) -> Architecture:
    """The architecture a checkpoint names; raises ModelError if none of them is supported."""
    for name in names:
        if name == TATTLE_TALE.name:
            return TATTLE_TALE
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    named = ", ".join(names) or "no architecture"
    raise ModelError(
        f"config.json names {named}, which is not supported; supported are {', '.join(sorted(ARCHITECTURES))}"
    )
