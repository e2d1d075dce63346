"""What a chaos run is: which model, which questions, which faults at which pace.

Two kinds: a tiny random model under everything there is, and a real one under kills and stops.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from baton.models import ModelDir
from benchmarks.chaos.decks import Deck, greater, lesser
from benchmarks.chaos.load import Case, Mix
from benchmarks.chaos.storm import Lane
from benchmarks.tiny_llama import write_tiny_model

REAL_MODEL = "smollm2-135m-instruct"
LESSER_EVERY_S = 3.0
GREATER_EVERY_S = 12.0
TINY_CACHE_BYTES = 16 << 20
_TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run.

    ray: decode workers are actors.  lanes: the faults.
    settings: further fields of ClusterConfig.  prefix_cache: of all workers.
    calm_s: load before the first fault.  least_rate: answers per second that must come then.
    """

    seed: int
    seconds: float
    ray: bool
    model: Path
    reference: PreTrainedModel
    mix: Mix
    lanes: list[Lane]
    settings: Mapping[str, object] = field(default_factory=dict)
    prefix_cache: bool = True
    calm_s: float = 5.0
    least_rate: float = 1.0


def tiny_plan(
    folder: Path,
    *,
    seed: int,
    seconds: float,
    ray: bool,
    num_clients: int = 10,
    every_s: tuple[float, float] = (LESSER_EVERY_S, GREATER_EVERY_S),
    settings: Mapping[str, object] | None = None,
) -> Plan:
    """A tiny model, made in the folder, under all faults; every_s: of the lesser and of the greater ones."""
    model = folder / "tiny"
    reference = write_tiny_model(model)
    decks = lesser(ray=ray), greater(is_scaled=True)
    return Plan(
        seed=seed,
        seconds=seconds,
        ray=ray,
        model=model,
        reference=reference,
        mix=Mix(cases=tiny_cases(), token_ids=range(3, 259), num_clients=num_clients),
        lanes=_lanes(decks, every_s),
        settings={"kv_cache_bytes": TINY_CACHE_BYTES, **(settings or {})},
    )


def real_plan(*, seed: int, seconds: float, ray: bool, num_clients: int = 3) -> Plan:
    """A real model in fp32 under kills, restarts and stops. ModelError if it is not pulled."""
    model = ModelDir.open(REAL_MODEL).path
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    decks = lesser(ray=ray, links=False), greater(is_scaled=False)
    return Plan(
        seed=seed,
        seconds=seconds,
        ray=ray,
        model=model,
        reference=reference.eval(),
        # A continuation is compared with the undisturbed one, so no prompt is new.
        mix=Mix(cases=real_cases(), token_ids=range(100, 1000), num_clients=num_clients, new_share=0.0),
        lanes=_lanes(decks, (2 * LESSER_EVERY_S, 2 * GREATER_EVERY_S)),
        # Decode workers would compute prompts of these lengths themselves, and prefill workers be idle; so
        # they would if they had the few prompts in their caches.
        settings={"kv_cache_bytes": 256 << 20, "placement": "disaggregated"},
        prefix_cache=False,
        calm_s=10.0,
        least_rate=0.1,
    )


def _lanes(decks: tuple[Deck, Deck], every_s: tuple[float, float]) -> list[Lane]:
    names = "lesser faults", "faults that end a process"
    return [
        Lane(name=name, deck=deck, every_s=pace)
        for name, deck, pace in zip(names, decks, every_s, strict=True)
    ]


def tiny_cases() -> list[Case]:
    """Prompts from one token to many chunks, with answers from short to seconds long; a few are sampled."""
    sizes = [(n, m) for n in (1, 16, 90, 300, 700, 1400) for m in (8, 60, 400)]
    greedy = _cases(sizes, range(3, 259))
    return [*greedy, *(_sampled(case, seed) for seed, case in enumerate(greedy[4::6], start=1))]


def real_cases() -> list[Case]:
    """As many as transformers can be asked about in a minute."""
    return _cases([(n, m) for n in (8, 60, 200) for m in (8, 32, 64)], range(100, 1000))


def _cases(sizes: list[tuple[int, int]], token_ids: range) -> list[Case]:
    rng = random.Random(1)
    return [
        Case(prompt=tuple(rng.choice(token_ids) for _ in range(length)), max_tokens=max_tokens)
        for length, max_tokens in sizes
    ]


def _sampled(case: Case, seed: int) -> Case:
    return Case(prompt=case.prompt, max_tokens=case.max_tokens, temperature=_TEMPERATURE, seed=seed)
