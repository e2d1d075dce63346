"""No request ever sees what is not its own: stale slots, padding, free and foreign blocks, its neighbors.

Where shapes are equal nothing may change a single bit; where a batch has other neighbors, sums may be taken
in another order, so logits are compared with a tolerance and greedy tokens exactly. So it is where the
experts of a mixture have other numbers of tokens.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from engine.request import Request
from engine.runner import ModelRunner
from tests.engine.tiny_models import (
    AWKWARD,
    load_runner,
    logits_of,
    make_request,
    prompts_of,
    scattered,
    shuffled_blocks,
)

torch.set_num_threads(1)

DTYPES = [torch.float32, torch.bfloat16]
LAYOUTS = ["HND", "NHD"]
WINDOW = 9


@pytest.fixture(scope="module", params=["full attention", f"window {WINDOW}"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    settings = AWKWARD | {"initializer_range": 0.2}
    if request.param == "full attention":
        LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder)
    else:
        MistralForCausalLM(MistralConfig(**settings, sliding_window=WINDOW)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(1)
    settings = AWKWARD | {"initializer_range": 0.2, "num_local_experts": 5, "num_experts_per_tok": 2}
    MixtralForCausalLM(MixtralConfig(**settings, sliding_window=None)).save_pretrained(folder)
    return folder


def runner_of(folder: Path, poison: float, dtype: torch.dtype, layout: str = "HND") -> ModelRunner:
    """Every slot of the cache holds the poison."""
    runner = load_runner(folder, dtype=dtype, layout=layout)
    runner.cache.data.fill_(poison)
    return runner


def life_of_a_batch(runner: ModelRunner) -> torch.Tensor:
    """All logits of: packed prompts, a chunk, a prefix hit in a mixed batch, and uneven decode steps."""
    free = shuffled_blocks()
    prompts = prompts_of(1, 3, 17, 41, 61)
    *short, long = (scattered(prompt, free, room=6) for prompt in prompts)
    logits = logits_of(runner, [*((request, request.num_tokens) for request in short), (long, 7)])
    logits += logits_of(runner, [(long, 30)])
    # The hit shares eight full blocks with the long prompt, and has two of its own.
    hit = make_request(
        [*prompts[-1][:32], 5, 6, 7],
        block_ids=[*long.block_ids[:8], free.pop(), free.pop()],
        num_computed_tokens=32,
    )
    extend(short)
    logits += logits_of(
        runner, [(short[0], 1), (long, 24), (short[1], 1), (hit, 3), (short[2], 1), (short[3], 1)]
    )
    for _ in range(3):
        requests = [*short, long, hit]
        extend(requests)
        logits += logits_of(runner, [(request, 1) for request in requests])
    return torch.cat(logits)


def extend(requests: list[Request]) -> None:
    for request in requests:
        request.token_ids.append(7 + len(request.token_ids) % 80)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_in_unused_slots_changes_no_bit(folder: Path, dtype: torch.dtype, layout: str) -> None:
    clean = life_of_a_batch(runner_of(folder, 0.0, dtype, layout))

    for poison in (torch.nan, torch.inf, torch.finfo(dtype).max):
        assert torch.equal(life_of_a_batch(runner_of(folder, poison, dtype, layout)), clean)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layout_of_the_cache_changes_no_bit(folder: Path, dtype: torch.dtype, layout: str) -> None:
    assert torch.equal(
        life_of_a_batch(runner_of(folder, torch.nan, dtype, layout)),
        life_of_a_batch(runner_of(folder, torch.nan, dtype, "HND")),
    )


def beside_others(runner: ModelRunner, seed: int) -> torch.Tensor:
    """Logits of chunks, a prompt and decode steps. seed: of their neighbors' tokens; lengths are fixed."""
    free, rng = shuffled_blocks(), random.Random(seed)
    own = [scattered(prompt, free, room=2) for prompt in prompts_of(26, 13)]
    others = [scattered([rng.randrange(101) for _ in range(n)], free, room=2) for n in (19, 33)]
    seen = []
    for counts in ((9, 13, 19, 8), (17, 1, 1, 25), (1, 1, 1, 1)):
        requests = [own[0], own[1], others[0], others[1]]
        for request in requests:
            if not request.num_pending_tokens:
                request.token_ids.append(rng.randrange(101) if request in others else 11)
        order = [2, 0, 3, 1]
        logits = logits_of(runner, [(requests[index], counts[index]) for index in order])
        seen += [logits[1], logits[3]]
    return torch.cat(seen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_neighbors_say_changes_no_bit(folder: Path, dtype: torch.dtype) -> None:
    one, other = (beside_others(runner_of(folder, torch.nan, dtype), seed) for seed in (1, 2))

    assert torch.equal(one, other)


def test_what_neighbors_say_changes_the_order_of_sums_of_a_mixture(mixture: Path) -> None:
    # Which tokens an expert computes hangs on all of them, and the order of sums on how many these are.
    first, *rest = (beside_others(runner_of(mixture, torch.nan, torch.float32), seed) for seed in range(6))

    for other in rest:
        torch.testing.assert_close(other, first, rtol=0.0, atol=1e-5)
        assert torch.equal(other.argmax(dim=-1), first.argmax(dim=-1))


def test_what_lies_in_unused_slots_changes_no_bit_of_a_mixture(mixture: Path) -> None:
    clean, poisoned = (
        life_of_a_batch(runner_of(mixture, poison, torch.float32)) for poison in (0.0, torch.nan)
    )

    assert torch.equal(poisoned, clean)


def test_what_is_not_finite_in_a_neighbor_stays_there(folder: Path) -> None:
    # The neighbor's own KV, in the same decode group and in the same packed batch, is NaN.
    def watched(poison: float) -> torch.Tensor:
        runner, free = runner_of(folder, 0.0, torch.float32), shuffled_blocks()
        own, other = (scattered(prompt, free, room=4) for prompt in prompts_of(14, 17))
        logits_of(runner, [(own, 14), (other, 17)])
        runner.cache.logical[other.block_ids] = poison
        seen = []
        for num_own, num_other in ((1, 1), (2, 1), (1, 2)):
            own.token_ids += [9] * num_own
            other.token_ids += [8] * num_other
            seen.append(logits_of(runner, [(other, num_other), (own, num_own)])[1])
        return torch.cat(seen)

    assert torch.equal(watched(torch.nan), watched(1.0))


def test_neighbors_and_order_change_no_greedy_token(folder: Path) -> None:
    prompts = prompts_of(5, 31, 12, 22, 1, 47)
    alone = [decode_greedily(folder, [prompt])[0] for prompt in prompts]
    shuffled = random.Random(5).sample(range(len(prompts)), len(prompts))

    for order in (list(range(len(prompts))), shuffled, shuffled[:3]):
        together = decode_greedily(folder, [prompts[index] for index in order])
        for index, (tokens, logits) in zip(order, together, strict=True):
            assert tokens == alone[index][0]
            torch.testing.assert_close(logits, alone[index][1], rtol=0.0, atol=1e-4)


def decode_greedily(folder: Path, prompts: list[list[int]]) -> list[tuple[list[int], torch.Tensor]]:
    """Ten tokens of each prompt and their logits; prompts come in chunks of 16, beside those that decode."""
    runner, free = runner_of(folder, torch.nan, torch.float32), shuffled_blocks()
    requests = [scattered(prompt, free, room=10) for prompt in prompts]
    rows: dict[int, list[torch.Tensor]] = {index: [] for index in range(len(prompts))}
    while waiting := [index for index, seen in rows.items() if len(seen) < 10]:
        step = [(requests[index], min(16, requests[index].num_pending_tokens)) for index in waiting]
        for index, logits in zip(waiting, logits_of(runner, step), strict=True):
            if not requests[index].num_pending_tokens:
                rows[index].append(logits[-1])
                requests[index].token_ids.append(int(logits[-1].argmax()))
    return [(request.token_ids, torch.stack(rows[index])) for index, request in enumerate(requests)]
