"""How far logits and greedy tokens of reduced precision are from fp32: tiny models and a real one.

    python -m benchmarks.precision [--model NAME] [--prompts N] [--steps S] [--seeds K] [--json FILE]

Every run gets the tokens of the fp32 run, so that positions can be compared one by one.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from baton.cluster.defaults import DEFAULT_MODEL
from baton.models import ModelDir
from benchmarks.precision_run import Computed, Precision, compute
from benchmarks.report import RESULTS, Row, publish

PROMPT_TOKENS = 100
# Text that does not change from run to run, and that nobody has to be given.
TEXT = Path(__file__).parents[1] / "LICENSE"

EXACT = Precision(dtype="float32", prefill_kv="float32", decode_kv="float32")
PRECISIONS = (
    Precision(dtype="float32", prefill_kv="float32", decode_kv="bfloat16"),
    Precision(dtype="float32", prefill_kv="float32", decode_kv="float16"),
    Precision(dtype="float32", prefill_kv="bfloat16", decode_kv="bfloat16"),
    Precision(dtype="float32", prefill_kv="float16", decode_kv="float16"),
    Precision(dtype="bfloat16", prefill_kv="float32", decode_kv="float32"),
    Precision(dtype="bfloat16", prefill_kv="bfloat16", decode_kv="bfloat16"),
    Precision(dtype="bfloat16", prefill_kv="bfloat16", decode_kv="float16"),
    Precision(dtype="float16", prefill_kv="float16", decode_kv="float16"),
    Precision(dtype="float16", prefill_kv="float16", decode_kv="bfloat16"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Of one precision from fp32, over all prompts and steps; logits are those of the whole vocabulary.

    max_logit, rms_logit: absolute differences. span: the standard deviation of the fp32 logits of a position.
    num_equal: positions whose greedy token is that of fp32, of num_tokens.
    """

    max_logit: float
    rms_logit: float
    span: float
    num_equal: int
    num_tokens: int
    num_saturated: int

    @classmethod
    def between(cls, exact: Computed, other: Computed) -> Deviation:
        """Compares two runs over the same tokens."""
        difference = (other.logits - exact.logits).double()
        equal_SP = exact.token_ids == other.token_ids
        return cls(
            max_logit=difference.abs().max().item(),
            rms_logit=difference.square().mean().sqrt().item(),
            span=exact.logits.double().std(dim=-1).mean().item(),
            num_equal=int(equal_SP.sum()),
            num_tokens=equal_SP.numel(),
            num_saturated=other.num_saturated,
        )

    @classmethod
    def worst_of(cls, deviations: Sequence[Deviation]) -> Deviation:
        """Of several models: the largest differences, and the sums of what is counted."""
        return cls(
            max_logit=max(each.max_logit for each in deviations),
            rms_logit=max(each.rms_logit for each in deviations),
            span=min(each.span for each in deviations),
            num_equal=sum(each.num_equal for each in deviations),
            num_tokens=sum(each.num_tokens for each in deviations),
            num_saturated=sum(each.num_saturated for each in deviations),
        )

    def rows(self, name: str) -> list[Row]:
        """What is published of it."""
        share = self.num_equal / self.num_tokens
        values = [
            ("max |dlogit|", "", self.max_logit),
            ("rms dlogit", "", self.rms_logit),
            ("rms dlogit / spread", "", self.rms_logit / self.span),
            ("equal greedy tokens", "share", share),
            ("saturated KV values", "", float(self.num_saturated)),
        ]
        return [
            Row(metric=f"{name} {metric}", unit=unit, ours=value, runs=self.num_tokens)
            for metric, unit, value in values
        ]


def deviations(model: str, prompts: Sequence[list[int]], num_steps: int) -> dict[Precision, Deviation]:
    """Of every precision from fp32, for one model."""
    exact = compute(model, EXACT, prompts, num_steps)
    forced_SP = exact.token_ids
    found = {}
    for precision in PRECISIONS:
        found[precision] = Deviation.between(exact, compute(model, precision, prompts, forced_SP))
        print(f"{precision} done", file=sys.stderr, flush=True)
    return found


def tiny(seeds: Iterable[int], num_prompts: int, num_steps: int) -> dict[Precision, Deviation]:
    """The worst of several random models, each with random prompts."""
    found: dict[Precision, list[Deviation]] = {precision: [] for precision in PRECISIONS}
    for seed in seeds:
        rng = random.Random(seed)
        with tempfile.TemporaryDirectory() as folder:
            vocab_size = _write_tiny(Path(folder), seed)
            prompts = [[rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_prompts)]
            for precision, deviation in deviations(folder, prompts, num_steps).items():
                found[precision].append(deviation)
    return {precision: Deviation.worst_of(each) for precision, each in found.items()}


def text_prompts(model: str, count: int) -> list[list[int]]:
    """Stretches of the license's text, one behind the other."""
    tokenizer = Tokenizer.from_file(str(ModelDir.open(model).tokenizer_path))
    token_ids: list[int] = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids
    if len(token_ids) < count * PROMPT_TOKENS:
        raise ValueError(f"{TEXT.name} has {len(token_ids)} tokens; {count * PROMPT_TOKENS} are needed")
    return [
        token_ids[first : first + PROMPT_TOKENS] for first in range(0, count * PROMPT_TOKENS, PROMPT_TOKENS)
    ]


def _write_tiny(folder: Path, seed: int) -> int:
    """A random Llama whose logits hang on tokens and positions; returns the size of its vocabulary."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=60,
        intermediate_size=84,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=20,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return 257


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a pulled model or a folder; empty: none")
    parser.add_argument("--prompts", type=int, default=20, help="prompts of each model")
    parser.add_argument("--steps", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--seeds", type=int, default=5, help="tiny models")
    parser.add_argument("--threads", type=int, default=1, help="threads of an operator")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the dated copy")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = {"tiny": tiny(range(arguments.seeds), arguments.prompts, arguments.steps)}
    if arguments.model:
        prompts = text_prompts(arguments.model, arguments.prompts)
        found[arguments.model] = deviations(arguments.model, prompts, arguments.steps)
    rows = [
        row
        for model, by_precision in found.items()
        for precision, deviation in by_precision.items()
        for row in deviation.rows(f"{model}, {precision},")
    ]
    kept = publish(
        "precision", rows, arguments.json, folder=arguments.results,
        prompts=arguments.prompts, prompt_tokens=PROMPT_TOKENS, steps=arguments.steps, seeds=arguments.seeds,
    )  # fmt: skip
    print(f"kept as {kept}")


if __name__ == "__main__":
    main()
