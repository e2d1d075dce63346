"""Prefill of long prompts against the formula: `python -m benchmarks.long_prompts [--model NAME]`.

Time per token over the length of the prompt, beside its FLOPs at the rate of a matrix product, and the cost
of scaled rotary embeddings and of the cache's other layout. benchmarks/README.md says what the rows mean.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from baton.limits import blocks_needed
from baton.model_config import ModelConfig
from baton.models import ModelDir
from baton.sampling import SamplingParams
from benchmarks.prefill_flops import FittedRates, attention_flops, linear_flops
from benchmarks.report import RESULTS, Row, publish
from benchmarks.tiny_llama import write_tiny_model
from engine.batch_builder import Chunk, build_batch
from engine.config import EngineConfig
from engine.kv_cache import KVCache
from engine.load import load_engine
from engine.model.loading import load_decoder
from engine.model.weights import Checkpoint
from engine.request import Request
from engine.runner import ModelRunner

TINY = "tiny"
LENGTHS = (512, 2048, 8192, 32_768)
SCALE_FACTOR = 4
# Scaled rotary embeddings are said to cost 7 % of the time of 32,768 tokens; ours is at most 1 / 0.935.
ROPE_TARGET = 0.935
PLAIN, SCALED, OTHER_LAYOUT = "plain", "dynamic rope", "NHD layout"
# Rows, inner and outer size of the product that the rate is taken from.
GEMM_SIZE = (512, 1024, 1024)
GEMM_RUNS = 9


class LongPrompts:
    """A model, its variants, and prompts for them.

    sides: the plain model, whose cache is HND; the same with scaled rotary embeddings; the same with an NHD
        cache. All have the same weights. Positions beyond the trained length are computed like any other:
        the text would make no sense there, the time does.
    """

    def __init__(self, model_dir: ModelDir, longest: int, engine: EngineConfig) -> None:
        self._chunk_tokens = engine.chunk_tokens
        plain = _with_rope(model_dir, longest, {"rope_type": "default"})
        scaled = _with_rope(
            model_dir, longest // SCALE_FACTOR, {"rope_type": "dynamic", "factor": float(SCALE_FACTOR)}
        )
        runner = load_engine(engine, plain)
        self.sides = {
            PLAIN: runner,
            SCALED: _sharing_cache(scaled, runner),
            OTHER_LAYOUT: ModelRunner(runner.model, KVCache(replace(runner.cache.shape, layout="NHD"))),
        }
        self._token_ids = random.Random(0).choices(range(runner.model.config.vocab_size), k=longest)

    def seconds(self, num_tokens: int, side: str = PLAIN) -> float:
        """Time of one prompt, computed in chunks until its token is sampled."""
        runner = self.sides[side]
        block_size, config = runner.cache.shape.block_size, runner.model.config
        limits = config.limits
        request = Request(
            attempt_id=bytes(16),
            token_ids=self._token_ids[:num_tokens],
            num_prompt_tokens=num_tokens,
            params=SamplingParams(max_tokens=1, temperature=0.0),
            block_ids=list(range(blocks_needed(num_tokens, block_size))),
            rope_step=limits.rope_step(num_tokens),
        )
        began = time.perf_counter()
        while count := min(self._chunk_tokens, request.num_pending_tokens):
            runner.run(build_batch(1, [Chunk.of(request, count)], block_size))
            request.num_computed_tokens += count
        return time.perf_counter() - began


@dataclass(slots=True)
class Rounds:
    """What the rounds yielded. gemm: FLOP/s.  plain: seconds of a prompt by its length.

    others: seconds of the longest, by side.
    """

    gemm: list[float] = field(default_factory=list)
    plain: dict[int, list[float]] = field(default_factory=dict)
    others: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, prompts: LongPrompts, lengths: list[int]) -> None:
        """One round: every length once, and the longest on all sides, which take turns to be first."""
        first = len(self.gemm) % len(prompts.sides)
        self.gemm.append(gemm_rate(prompts.sides[PLAIN].model.dtype))
        *shorter, longest = lengths
        for length in shorter:
            self.plain.setdefault(length, []).append(prompts.seconds(length))
        sides = list(prompts.sides)
        for side in sides[first:] + sides[:first]:
            of_side = (
                self.plain.setdefault(longest, []) if side == PLAIN else self.others.setdefault(side, [])
            )
            of_side.append(prompts.seconds(longest, side))

    def rows(self, config: ModelConfig) -> list[Row]:
        """Medians over the rounds."""
        gemm, runs = median(self.gemm), len(self.gemm)
        linear = linear_flops(config)
        attention = {length: attention_flops(config, length) for length in self.plain}
        measured = {length: median(times) / length for length, times in self.plain.items()}
        rows = [Row(metric="matrix product", unit="GFLOP/s", ours=gemm / 1e9, runs=runs)]
        rows += [
            _beside(f"{length} tokens, each", "us", 1e6 * measured[length], 1e6 * flops / gemm, runs)
            for length, flops in ((n, linear + attention[n]) for n in self.plain)
        ]
        if len(measured) > 1:
            fitted = FittedRates.of(linear, list(attention.values()), list(measured.values()))
            rows += _fit_rows(fitted, gemm, runs)
        return [*rows, *(self._side_row(side) for side in self.others)]

    def _side_row(self, side: str) -> Row:
        longest = max(self.plain)
        ratios = [plain / other for plain, other in zip(self.plain[longest], self.others[side], strict=True)]
        return Row(
            metric=f"{longest} tokens, each, {side}",
            unit="us",
            ours=1e6 * median(self.others[side]) / longest,
            runs=len(ratios),
            peer=1e6 * median(self.plain[longest]) / longest,
            peer_name="plain rope, HND layout",
            ratio=median(ratios),
            target=ROPE_TARGET if side == SCALED else None,
        )


def gemm_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product of GEMM_SIZE, the median of a few."""
    rows, inner, outer = GEMM_SIZE
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
    seconds = []
    for _ in range(GEMM_RUNS):
        began = time.perf_counter()
        torch.nn.functional.linear(a, b)
        seconds.append(time.perf_counter() - began)
    return 2 * rows * inner * outer / median(seconds)


def _fit_rows(fitted: FittedRates, gemm: float, runs: int) -> list[Row]:
    def row(part: str, rate: float) -> Row:
        return Row(
            metric=f"{part}, fitted",
            unit="GFLOP/s",
            ours=rate / 1e9,
            runs=runs,
            peer=gemm / 1e9,
            peer_name="matrix product",
            ratio=rate / gemm,
        )

    error = Row(metric="worst length beside the fit", unit="%", ours=100 * fitted.error, runs=runs)
    return [row("projections", fitted.linear), row("attention", fitted.attention), error]


def _beside(metric: str, unit: str, ours: float, formula: float, runs: int) -> Row:
    return Row(
        metric=metric,
        unit=unit,
        ours=ours,
        runs=runs,
        peer=formula,
        peer_name="the formula",
        ratio=formula / ours,
    )


def _with_rope(model_dir: ModelDir, length: int, rope: dict[str, object]) -> ModelDir:
    known = model_dir.config.get("rope_parameters") or {}
    theta = known.get("rope_theta", model_dir.config.get("rope_theta", 10000.0))
    config = {
        **model_dir.config,
        "max_position_embeddings": length,
        "rope_parameters": {**rope, "rope_theta": theta},
    }
    config.pop("rope_scaling", None)
    return replace(model_dir, config=config)


def _sharing_cache(model_dir: ModelDir, other: ModelRunner) -> ModelRunner:
    config = model_dir.model_config
    checkpoint = Checkpoint(model_dir.weights_files, dtype=other.model.dtype)
    return ModelRunner(load_decoder(config, checkpoint), other.cache)


def _engine_config(model_dir: ModelDir, longest: int, threads: int, chunk_tokens: int) -> EngineConfig:
    model = model_dir.model_config
    # Four bytes an element are enough for any dtype; a few blocks are to spare.
    token_bytes = 4 * 2 * model.num_layers * model.num_kv_heads * model.head_dim
    return EngineConfig(
        threads=threads,
        chunk_tokens=chunk_tokens,
        expected_tokens=longest,
        kv_cache_bytes=token_bytes * (longest + 1024),
        prefix_cache=False,
    )


def measure(model_dir: ModelDir, arguments: argparse.Namespace) -> list[Row]:
    """Loads the model and measures it."""
    lengths = sorted(set(arguments.lengths))
    engine = _engine_config(model_dir, lengths[-1], arguments.threads, arguments.chunk_tokens)
    prompts = LongPrompts(model_dir, lengths[-1], engine)
    # What is made on first use is there by then.
    for side in prompts.sides:
        prompts.seconds(lengths[0], side)
    rounds = Rounds()
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", flush=True)
        rounds.measure(prompts, lengths)
    return rounds.rows(prompts.sides[PLAIN].model.config)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=TINY, help="a pulled model or a folder; tiny makes a random one")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="of prompts, in tokens")
    parser.add_argument("--chunk-tokens", type=int, default=EngineConfig().chunk_tokens)
    parser.add_argument("--threads", type=int, default=1, help="threads of one operator")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the dated copy")
    parser.add_argument("--json", help="write the rows here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-long-prompts-") as folder:
        if arguments.model == TINY:
            write_tiny_model(Path(folder), max_model_len=max(arguments.lengths))
        model_dir = ModelDir.open(folder if arguments.model == TINY else arguments.model)
        rows = measure(model_dir, arguments)
    facts = {name: getattr(arguments, name) for name in ("model", "chunk_tokens", "threads", "rounds")}
    kept = publish("long-prompts", rows, arguments.json, folder=arguments.results, **facts)
    print(f"kept as {kept}")


if __name__ == "__main__":
    main()
