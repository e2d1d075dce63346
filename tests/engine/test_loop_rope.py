"""Dynamic NTK and longrope through the whole engine, against transformers.

transformers takes its scale from the length of what it is given and mixes scales in one cache while an
answer grows (docs/adr/0008). So it is the reference where nothing grows past a step; beyond, it is asked
anew for every token, with the frequencies of that token's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.events import Event, TokenSampled
from engine.loop import EngineLoop
from tests.engine.tiny_models import (
    Reference,
    greedy_reference,
    load_runner,
    logits_of,
    make_request,
    prompts_of,
    reference_logits,
    scattered,
    shuffled_blocks,
)

HEAD_DIM, ORIGINAL, THETA, FACTOR = 20, 40, 1000.0, 4.0
DYNAMIC = {"rope_type": "dynamic", "factor": FACTOR, "rope_theta": THETA}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": THETA,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + 0.1 * index for index in range(HEAD_DIM // 2)],
    "long_factor": [1.5 + 0.5 * index for index in range(HEAD_DIM // 2)],
}
MODELS = {
    "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL},
    "longrope": {"rope_parameters": LONGROPE, "max_position_embeddings": 160},
}
STEPS = {"dynamic": (40, 80, 160), "longrope": (40, 160)}


def engine_loop(folder: Path, **settings: Any) -> EngineLoop:
    config = EngineConfig(model=str(folder), block_size=4, **settings)
    return EngineLoop(load_runner(folder, num_blocks=200), config)


def greedy(loop: EngineLoop, prompt: list[int], num_tokens: int) -> list[int]:
    (answer,) = loop.generate([prompt], SamplingParams(temperature=0, max_tokens=num_tokens))
    return prompt + answer


def frequencies(name: str, longest: int) -> torch.Tensor:
    """By hand, for sequences of up to `longest` tokens."""
    powers = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM
    if name == "longrope":
        factors = LONGROPE["short_factor" if longest <= ORIGINAL else "long_factor"]
        return (1 / (torch.tensor(factors, dtype=torch.float64) * THETA**powers)).float()
    stretched = FACTOR * longest / ORIGINAL - (FACTOR - 1)
    return ((THETA * stretched ** (HEAD_DIM / (HEAD_DIM - 2))) ** -powers).float()


def token_by_token(
    model: LlamaForCausalLM,
    name: str,
    prompt: list[int],
    num_tokens: int,
    allowed: Sequence[int] | None = None,
) -> list[int]:
    """Greedy tokens, each computed from all before it at the step of their number.

    allowed: ids that a grammar leaves; all by default.
    """
    rotary = model.model.rotary_emb
    kept = rotary.inv_freq, rotary.rope_type
    rotary.rope_type = "default"  # so that it leaves alone what is set here
    tokens = list(prompt)
    for _ in range(num_tokens):
        longest = next(step for step in STEPS[name] if len(tokens) <= step)
        rotary.inv_freq = frequencies(name, longest)
        logits = reference_logits(model, tokens)[-1]
        ids = torch.tensor(range(len(logits)) if allowed is None else sorted(allowed))
        tokens.append(int(ids[logits[ids].argmax()]))
    rotary.inv_freq, rotary.rope_type = kept
    return tokens


@pytest.mark.parametrize(
    # Between two steps transformers takes a scale of dynamic NTK that we do not have.
    ("name", "length"),
    [("dynamic", n) for n in (3, 40, 80)] + [("longrope", n) for n in (3, 40, 41, 159)],
)
def test_logits_of_a_prompt_are_those_of_transformers(
    reference_model: Reference, name: str, length: int
) -> None:
    folder, reference = reference_model(**MODELS[name])
    (prompt,) = prompts_of(length)
    runner = load_runner(folder)
    request = scattered(prompt, shuffled_blocks())
    request.rope_step = sum(step < length for step in STEPS[name])
    found = torch.cat(
        [logits_of(runner, [(request, n)])[0] for n in (1, length // 2, length - length // 2 - 1)]
    )
    expected = reference_logits(reference, prompt)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_answers_within_the_original_length_are_those_of_transformers(
    reference_model: Reference, name: str
) -> None:
    folder, reference = reference_model(**MODELS[name])
    (prompt,) = prompts_of(8)
    assert greedy(engine_loop(folder), prompt, 32) == greedy_reference(reference, prompt, 32)


def test_answers_of_a_long_prompt_are_those_of_transformers_while_the_scale_stays(
    reference_model: Reference,
) -> None:
    folder, reference = reference_model(**MODELS["longrope"])
    (prompt,) = prompts_of(41)
    assert greedy(engine_loop(folder, chunk_tokens=7), prompt, 32) == greedy_reference(reference, prompt, 32)


@pytest.mark.parametrize(
    ("name", "length", "num_tokens"),
    [
        ("dynamic", 36, 16),
        ("dynamic", 40, 16),
        ("dynamic", 37, 48),
        ("longrope", 36, 16),
        ("longrope", 40, 16),
    ],
)
def test_answers_that_outgrow_their_step_are_computed_anew_at_the_next(
    reference_model: Reference, name: str, length: int, num_tokens: int
) -> None:
    folder, reference = reference_model(**MODELS[name])
    (prompt,) = prompts_of(length)
    expected = token_by_token(reference, name, prompt, num_tokens)
    assert greedy(engine_loop(folder), prompt, num_tokens) == expected
    # What is not computed anew would show: the scale of the start leads elsewhere.
    assert expected != greedy_reference(reference, prompt, num_tokens)


def test_a_long_prompt_leaves_nothing_behind_for_a_short_one(reference_model: Reference) -> None:
    folder, reference = reference_model(**MODELS["dynamic"])
    (long,) = prompts_of(120)
    loop = engine_loop(folder)
    greedy(loop, long, 4)
    # The same tokens, so that a cache of the wrong scale would be found.
    for short in (long[:24], prompts_of(25)[0]):
        fresh = greedy(engine_loop(folder), short, 12)
        assert greedy(loop, short, 12) == fresh == greedy_reference(reference, short, 12)


def test_logprobs_at_a_step_are_those_of_transformers(reference_model: Reference) -> None:
    folder, reference = reference_model(**MODELS["dynamic"])
    (prompt,) = prompts_of(80)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=True, prompt_logprobs=0)
    events: list[Event] = []
    engine_loop(folder).run([make_request(prompt, params=params)], events.append)
    first = next(event for event in events if isinstance(event, TokenSampled))
    expected = reference_logits(reference, prompt).log_softmax(-1)
    assert first.token_id == int(expected[-1].argmax())
    assert first.logprob == pytest.approx(expected[-1].max().item(), abs=1e-4)
    assert first.prompt_logprobs is not None
    theirs = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    ours = torch.tensor(first.prompt_logprobs.logprobs)
    torch.testing.assert_close(ours, theirs[-len(ours) :], rtol=0, atol=1e-4)


def test_drawn_tokens_do_not_depend_on_how_requests_are_batched(reference_model: Reference) -> None:
    folder, _ = reference_model(**MODELS["dynamic"])
    prompts = prompts_of(12, 39, 70)
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=30)
    together = engine_loop(folder).generate(prompts, params)
    loop = engine_loop(folder, chunk_tokens=5, max_batch_tokens=12, max_running=2, prefix_cache=False)
    assert together == [loop.generate([prompt], params)[0] for prompt in prompts]
