"""The planner against arithmetic, against queues that are simulated, and against what was measured here."""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.bench.trace_file import TraceEntry
from baton.cli.main import app
from baton.errors import ConfigError
from baton.model_config import ModelConfig
from baton.plan.costs import ModelCosts
from baton.plan.demand import Demand, Objectives
from baton.plan.planner import Planner, break_even
from baton.plan.profile import SHIPPED, DeviceProfile, read_profiles
from baton.plan.queueing import erlang_c, share_within, waits

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SMOLLM: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
# Qwen3-30B-A3B.
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
OBJECTIVES = Objectives(ttft_s=1.0, itl_s=0.05)


def costs(config: dict[str, Any] = LLAMA_8B) -> ModelCosts:
    return ModelCosts.of(ModelConfig.from_hf(config))


def test_llama_8b_by_hand() -> None:
    found = costs()
    # q and o: 4096 * 4096 each; k and v: 4096 * 1024 each; three products with 14336.
    per_layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert found.linear_params == 32 * per_layer == 6_979_321_856
    # 8.03 billion weights, as the model's card says, but for the norms.
    assert found.stored_bytes == 2 * 8_029_995_008 == 2 * (32 * per_layer + 2 * 128_256 * 4096)
    assert found.kv_bytes_per_token == 131_072
    attention = 2 * 32 * 32 * 128 * 2048**2
    head = 2 * 128_256 * 4096
    assert found.prefill_flops(2048) == 2 * 6_979_321_856 * 2048 + attention + head
    read = 2 * (6_979_321_856 + 128_256 * 4096)
    assert found.decode_bytes(4, 1000) == read + 4 * 1000 * 131_072
    assert found.decode_flops(4, 1000) == 4 * (read + 4 * 32 * 32 * 128 * 1000)


def test_a_window_and_experts_cost_what_is_used() -> None:
    windowed = LLAMA_8B | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 1024,
    }
    assert costs(windowed).decode_bytes(1, 4096) == costs().decode_bytes(1, 1024)
    mixture = LLAMA_8B | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    found = costs(mixture)
    expert = 3 * 4096 * 14336
    assert found.stored_bytes - costs().stored_bytes == 2 * 32 * (7 * expert + 4096 * 8)
    assert found.linear_params - costs().linear_params == 32 * (expert + 4096 * 8)
    # One answer reads two experts, many read all.
    rng = random.Random(3)
    for batch in (1, 2, 4, 16):
        draws = [{e for _ in range(batch) for e in rng.sample(range(8), 2)} for _ in range(4000)]
        read = sum(map(len, draws)) / len(draws)
        expected = costs().decode_bytes(1, 0) + 2 * 32 * ((read - 1) * expert + 4096 * 8)
        assert found.decode_bytes(batch, 0) == pytest.approx(expected, rel=0.01)
    assert found.decode_bytes(400, 0) == pytest.approx(found.stored_bytes - 2 * 128256 * 4096)


def test_a_prompt_of_a_mixture_reads_the_experts_that_its_tokens_choose() -> None:
    """Shape of Qwen3-30B-A3B: 60 GB of weights, of which a token passes a tenth."""
    found = costs(QWEN3_30B)
    profile = DeviceProfile.of("h100-80gb")
    planner = Planner(found, profile, Demand.of_lengths(1.0, median=200, p90=None, output=50), OBJECTIVES, 1)
    reading_s = found.stored_bytes / (1e9 * profile.memory_gbps * profile.decode[1])
    assert planner.prefill_s(1000) == pytest.approx(reading_s, rel=0.05)
    assert planner.prefill_s(1) < 0.15 * reading_s


@pytest.mark.parametrize("num_tokens", [1, 700, 1024, 1500, 4096])
def test_attention_in_a_window_has_as_many_pairs_as_are_seen(num_tokens: int) -> None:
    windowed = LLAMA_8B | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 1024,
    }
    seen = sum(min(position, 1024) for position in range(1, num_tokens + 1))
    linear = costs().prefill_flops(num_tokens) - 2 * 32 * 32 * 128 * num_tokens**2
    # A token's own key is half a pair in the formula, and a whole one here.
    expected = linear + 4 * 32 * 32 * 128 * seen
    assert costs(windowed).prefill_flops(num_tokens) == pytest.approx(expected, rel=1e-3)


def test_erlang_c_is_that_of_the_tables() -> None:
    # One server: the load itself. Three servers at a load of two: 4 / 9.
    assert erlang_c(0.7, 1) == pytest.approx(0.7)
    assert erlang_c(2.0, 3) == pytest.approx(4 / 9)
    # By its sum, of k servers at load a: (a^k / k!) (k / (k - a)) / (sum + that).
    for load, servers in ((4.5, 6), (9.0, 10), (30.0, 35)):
        top = load**servers / math.factorial(servers) * servers / (servers - load)
        rest = sum(load**index / math.factorial(index) for index in range(servers))
        assert erlang_c(load, servers) == pytest.approx(top / (rest + top))
    assert waits(1.0, 2.0, 1.0, 2) == (1.0, math.inf)
    assert share_within(-0.1, 0.5, 1.0) == 0.0


def simulated(rate: float, services: list[float], num_servers: int, limit_s: float) -> float:
    """Share of jobs done within limit_s of their arrival: first come, first served, Poisson arrivals."""
    rng, now, done = random.Random(5), 0.0, 0
    free_at = [0.0] * num_servers
    number = 40_000
    for _ in range(number):
        now += rng.expovariate(rate)
        service = rng.choice(services)
        start = max(now, heapq.heappop(free_at))
        heapq.heappush(free_at, start + service)
        done += start + service - now <= limit_s
    return done / number


@pytest.mark.parametrize(
    ("rate", "median", "p90"), [(4.0, 2000, 2000), (10.0, 2000, 8000), (30.0, 500, 4000)]
)
def test_prefill_workers_are_enough_and_one_less_is_not(rate: float, median: float, p90: float) -> None:
    profile = DeviceProfile.of("h100-80gb")
    demand = Demand.of_lengths(rate, median=median, p90=p90, output=200)
    planner = Planner(costs(), profile, demand, OBJECTIVES, 1)
    number = planner.prefill_workers()
    services = [planner.prefill_s(length) for length in demand.prompts]
    limit_s = OBJECTIVES.ttft_s - planner.step_s(1)
    # Allen and Cunneen's formula is an approximation: within two points of what is simulated.
    assert simulated(rate, services, number, limit_s) >= OBJECTIVES.share - 0.02
    assert planner.plan().ttft_share == pytest.approx(simulated(rate, services, number, limit_s), abs=0.03)
    if number > 1:
        assert simulated(rate, services, number - 1, limit_s) < OBJECTIVES.share


def test_answers_at_once_are_those_that_come_and_go() -> None:
    demand = Demand.of_lengths(20.0, median=1000, p90=None, output=250)
    planner = Planner(costs(), DeviceProfile.of("h100-80gb"), demand, OBJECTIVES, 1)
    for workers in (1, 2, 5):
        batch = planner.batch(workers)
        # Little's law, and the same steps one by one: tokens that are wanted are tokens that are made.
        assert workers * batch / planner.step_s(batch) == pytest.approx(20.0 * 250)
    assert planner.step_s(planner.batch(planner.decode_workers())) <= OBJECTIVES.itl_s
    assert math.isinf(Planner(costs(), DeviceProfile.of("l40s-48gb"), demand, OBJECTIVES, 0).batch(1))


def kept(
    rate: float, num_workers: int, num_tokens: int, step_s: Callable[[int], float], limit_s: float
) -> float:
    """Share of answers whose mean gap is at most limit_s: Poisson arrivals, each to the emptiest worker."""
    rng, now, gaps = random.Random(7), 0.0, []
    running: list[list[list[float]]] = [[] for _ in range(num_workers)]
    clocks = [0.0] * num_workers
    for _ in range(6_000):
        now += rng.expovariate(rate)
        for worker, answers in enumerate(running):
            while answers and clocks[worker] < now:
                clocks[worker] += step_s(len(answers))
                for answer in answers:
                    answer[1] -= 1
                gaps += [(clocks[worker] - began) / num_tokens for began, left in answers if not left]
                answers[:] = [answer for answer in answers if answer[1]]
        worker = min(range(num_workers), key=lambda number: len(running[number]))
        clocks[worker] = max(clocks[worker], now) if not running[worker] else clocks[worker]
        running[worker].append([now, num_tokens])
    return sum(gap <= limit_s for gap in gaps) / len(gaps)


@pytest.mark.parametrize(("rate", "itl_s"), [(40.0, 0.03), (60.0, 0.015)])
def test_decode_workers_are_enough_and_one_less_is_not(rate: float, itl_s: float) -> None:
    demand = Demand.of_lengths(rate, median=1360, p90=None, output=211)
    objectives = Objectives(ttft_s=1.0, itl_s=itl_s)
    planner = Planner(costs(), DeviceProfile.of("h100-80gb"), demand, objectives, 1)
    number = planner.decode_workers()
    # 2 bytes for each weight of layers and head, 131,072 for each token of KV; 65 % of 3.35 TB/s.
    read = 2 * (6_979_321_856 + 128_256 * 4096)

    def step_s(batch: int) -> float:
        return (read + batch * (1360 + 211 / 2) * 131_072) / (0.65 * 3.35e12)

    assert kept(rate, number, 211, step_s, itl_s) >= objectives.share
    assert number > 1
    assert kept(rate, number - 1, 211, step_s, itl_s) < objectives.share


def test_more_is_never_needed_for_less() -> None:
    profile = DeviceProfile.of("h200-141gb")

    def needed(rate: float, case: int = 1, ttft_s: float = 1.0) -> tuple[int, int]:
        demand = Demand.of_lengths(rate, median=2000, p90=6000, output=300)
        found = Planner(costs(), profile, demand, Objectives(ttft_s=ttft_s, itl_s=0.04), case).plan()
        return found.prefill, found.decode

    by_rate = [needed(rate) for rate in (1, 5, 20, 80)]
    assert by_rate == sorted(by_rate)
    assert by_rate[-1] > by_rate[0]
    low, expected, high = (needed(40, case) for case in range(3))
    assert low >= expected >= high
    assert needed(40, ttft_s=0.5) >= needed(40, ttft_s=5.0)


def test_measured_here() -> None:
    """SmolLM2-135M on two cores: what the profile's shares stand for, and the range holds it."""
    demand = Demand.of_lengths(0.5, median=512, p90=None, output=32)
    profile, objectives = DeviceProfile.of("cpu-2core"), Objectives(ttft_s=4.0, itl_s=0.15)
    low, _, high = (Planner(costs(SMOLLM), profile, demand, objectives, case) for case in range(3))
    for tokens, seconds in ((128, 0.117), (512, 0.389), (2048, 2.194)):
        assert high.prefill_s(tokens) * 0.9 <= seconds <= low.prefill_s(tokens) * 1.1
    for batch, seconds in ((1, 0.026), (8, 0.042), (32, 0.118)):
        assert high.step_s(batch) * 0.9 <= seconds <= low.step_s(batch) * 1.1


def test_the_split_pays_from_some_length_on() -> None:
    profile = DeviceProfile.of("h100-80gb")
    demand = Demand.of_lengths(20.0, median=500, p90=2000, output=200)
    tight = Objectives(ttft_s=1.0, itl_s=0.025)
    length = break_even(costs(), profile, demand, tight)
    assert length is not None

    def pays(prompt: float) -> bool:
        found = Planner(costs(), profile, demand.scaled(prompt / demand.mean_prompt), tight, 1).plan()
        return found.colocated is None or found.prefill + found.decode <= found.colocated

    assert not pays(length / 1.2)
    longer = [length * 1.2**step for step in range(1, 12)]
    assert all(pays(prompt) for prompt in longer if prompt <= 16 * demand.mean_prompt)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"rate": 0.0}, "rate"),
        ({"rate": math.inf}, "rate"),
        ({"median": 0.5}, "prompt"),
        ({"p90": 10.0}, "prompt_p90"),
        ({"output": 0.0}, "output"),
    ],
)
def test_what_cannot_be_is_named(settings: dict[str, float], field: str) -> None:
    given: dict[str, Any] = {"rate": 1.0, "median": 100.0, "p90": None, "output": 10.0} | settings
    with pytest.raises(ConfigError) as caught:
        Demand.of_lengths(given.pop("rate"), **given)
    assert caught.value.field == field


def test_objectives_that_no_number_of_workers_meets_are_named() -> None:
    demand = Demand.of_lengths(1.0, median=100_000, p90=None, output=100)
    profile = DeviceProfile.of("a100-80gb")
    with pytest.raises(ConfigError, match="0% of the prompts can be computed at all") as caught:
        Planner(costs(), profile, demand, OBJECTIVES, 1).plan()
    assert caught.value.field == "ttft"
    with pytest.raises(ConfigError, match="one answer alone has a token every") as caught:
        Planner(costs(), profile, demand, Objectives(ttft_s=100, itl_s=0.001), 1).plan()
    assert caught.value.field == "itl"
    small = DeviceProfile(
        name="small",
        peak_tflops=1,
        memory_gb=8,
        memory_gbps=1,
        gbps_link=1,
        prefill=(1, 1, 1),
        decode=(1, 1, 1),
    )
    with pytest.raises(ConfigError, match=r"weights take 16\.1 GB") as caught:
        Planner(costs(), small, demand, OBJECTIVES, 1)
    assert caught.value.field == "device"


def test_a_trace_gives_its_own_lengths_and_rate() -> None:
    entries = [
        TraceEntry(at_s=float(index), num_prompt_tokens=100 * (index + 1), num_output_tokens=10)
        for index in range(11)
    ]
    demand = Demand.of_trace(entries, None)
    assert (demand.rate, demand.mean_prompt, demand.output) == (1.0, 600.0, 10.0)
    assert Demand.of_trace(entries, 5.0).rate == 5.0
    long = [replace(entry, at_s=float(turn)) for turn in range(100) for entry in entries]
    many = Demand.of_trace(long, None)
    assert len(many.prompts) == 64
    # 1,100 requests in 64 groups: of 17 or 18, so the mean is nearly theirs.
    assert many.mean_prompt == pytest.approx(600, rel=0.01)
    assert (many.prompts[0], many.prompts[-1]) == (100, 1100)
    with pytest.raises(ConfigError, match="one moment only"):
        Demand.of_trace(entries[:1], None)


def test_every_profile_can_be_read_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    names = list(read_profiles())
    assert len(names) >= 6
    assert all(DeviceProfile.of(name).memory_gb > 0 for name in names)
    with pytest.raises(ConfigError, match="h100-80gb") as caught:
        DeviceProfile.of("abacus")
    assert caught.value.field == "device"
    text = SHIPPED.read_text()
    wrong = tmp_path / "profiles.toml"
    for broken, words in (
        (text.replace("memory_gb = 80.0", "memory = 80.0", 1), "memory, memory_gb missing or unknown"),
        (text.replace("[0.50, 0.60, 0.67]", "[0.9, 0.6, 0.72]", 1), "low to high"),
        ("[", "cannot be read as profiles"),
    ):
        wrong.write_text(broken)
        with pytest.raises(ConfigError, match=words):
            DeviceProfile.of("a100-80gb", wrong)


def command(tmp_path: Path, *options: str) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    model = ("--model", str(tmp_path / "config.json"), "--device", "h100-80gb")
    return CliRunner().invoke(app, ["plan", *model, *options])


def test_lengths_that_the_model_does_not_take_and_given_twice_are_refused(tmp_path: Path) -> None:
    too_long = command(tmp_path, "--rate", "1", "--prompt", "131000", "--output", "300")
    assert isinstance(too_long.exception, ConfigError)
    assert "more than the 131072 tokens of the model's context" in too_long.exception.message
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,input_tokens,output_tokens\n0,5,5\n1,5,5\n")
    twice = command(tmp_path, "--trace", str(trace), "--prompt", "5")
    assert isinstance(twice.exception, ConfigError)
    assert "leave out --prompt" in twice.exception.message


def test_the_command_says_what_is_needed(tmp_path: Path) -> None:
    load = ("--rate", "10", "--prompt", "2000", "--prompt-p90", "8000", "--output", "300")
    shown = command(tmp_path, *load, "--explain")
    assert shown.exit_code == 0, shown.output
    assert "decode workers" in shown.output
    assert "KV: 128.0 KiB per token; weights: 16.06 GB" in shown.output
    told = json.loads(command(tmp_path, *load, "--json").output)
    demand = Demand.of_lengths(10, median=2000, p90=8000, output=300)
    expected = Planner(costs(), DeviceProfile.of("h100-80gb"), demand, OBJECTIVES, 1).plan()
    assert told["plans"]["expected"]["prefill"] == expected.prefill
    assert told["plans"]["expected"]["decode"] == expected.decode
    assert set(told["plans"]) == {"low", "expected", "high"}


def test_the_command_reads_traces_and_names_what_is_missing(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{index},{500 + 10 * index},{100}" for index in range(50)]
    trace.write_text("\n".join(["time_s,input_tokens,output_tokens", *rows]))
    told = json.loads(command(tmp_path, "--trace", str(trace), "--json").output)
    assert told["demand"] == {"rate": 1.0, "mean_prompt": 745.0, "output": 100.0}
    refused = command(tmp_path, "--rate", "1")
    assert isinstance(refused.exception, ConfigError | SystemExit)
