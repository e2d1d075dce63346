"""What tests of starts and steps run in a process of its own, where Triton is not interpreted.

    python -m tests.engine.kernels.serving programs  what steps would compile that the start did not, by model
    python -m tests.engine.kernels.serving calls     calls of the pass and calls that are measured, compared
    python -m tests.engine.kernels.serving shapes    shapes of which a model has several programs

Models have their own sizes, on the meta device: nothing is computed or compiled. Prints JSON.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.runtime import driver

from baton.model_config import ModelConfig
from engine.batch import ForwardBatch
from engine.kernels.block_copy import gather_blocks, scatter_blocks
from engine.kernels.cases import LLAMA, MODELS
from engine.kernels.choices import UNMEASURED, Choices
from engine.kernels.contests import EMBED_RMS_NORM_QKV, PREFILL_ATTENTION
from engine.kernels.devices import DEVICES
from engine.kernels.kernel import Launch
from engine.kernels.model_launches import Step, model_launches
from engine.kernels.model_tuning import STEPS, tune_model
from engine.kv_cache import CacheShape, KVCache
from engine.kv_staging import KvStaging
from engine.model.decoder import Decoder
from engine.model.forward_pass import DecoderWeights
from engine.model.fused_pass import FusedPass
from engine.model.layer import LayerWeights, Mlp, Projection
from engine.runner import _dummy_batch
from tests.engine.kernels.compiling import AbsentDriver

META = torch.device("meta")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_LEN = 16384
NUM_BATCHES = 24
GEMMA = MODELS[2].config


def of_family(architecture: str, **settings: Any) -> ModelConfig:
    sizes = {
        "architectures": [architecture],
        "num_hidden_layers": 2,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
        "max_position_embeddings": MAX_LEN,
    }
    return ModelConfig.from_hf(sizes | settings)


def shortened(config: ModelConfig, num_layers: int) -> ModelConfig:
    return replace(config, num_layers=num_layers, layers=config.layers[:num_layers], max_model_len=MAX_LEN)


CONFIGS = {
    "llama": shortened(LLAMA.config, 2),
    # Windows of 1,024 in five layers, none in the sixth.
    "gemma": shortened(GEMMA, 6),
    "mistral": of_family("MistralForCausalLM", sliding_window=4096),
    # A window that is no multiple of 16, heads that are none either, and a key head for all queries.
    "odd": of_family("MistralForCausalLM", sliding_window=2047, head_dim=120, num_key_value_heads=1),
    # Narrow heads, eight to a key head: tiles of 16, 32 and 64 rows.
    "experts": of_family(
        "MixtralForCausalLM",
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def decoder_of(config: ModelConfig, dtype: torch.dtype, choices: Choices) -> Decoder:
    """With weights of which only the sizes are there."""
    width, num_attended = config.hidden_size, config.num_heads * config.head_dim
    num_rotated = config.num_heads + config.num_kv_heads
    num_outputs = (num_rotated + config.num_kv_heads) * config.head_dim

    def linear(num_out: int, num_in: int, *, bias: bool = False) -> Projection:
        return Projection(
            weight=empty(num_out, num_in, dtype=dtype), bias=empty(num_out, dtype=dtype) if bias else None
        )

    def mlp() -> Any:
        gate_up = linear(2 * config.intermediate_size, width)
        return Mlp(
            activation=config.activation, gate_up=gate_up, down=linear(width, config.intermediate_size)
        )

    def layer(*, is_moe: bool) -> LayerWeights:
        post_norm = empty(width) if config.post_norms else None
        return LayerWeights(
            input_norm=empty(width),
            qkv=linear(num_outputs, width, bias=config.attention_bias),
            head_norm=empty(num_rotated, config.head_dim) if config.qk_norm else None,
            output=linear(width, num_attended),
            attention_out_norm=post_norm,
            mlp_norm=empty(width),
            # Experts choose by values, which are not there; they hand on fp32.
            mlp=(lambda x_TD: empty(*x_TD.shape)) if is_moe else mlp(),  # type: ignore[arg-type]
            mlp_out_norm=post_norm,
        )

    weights = DecoderWeights(
        embedding=empty(config.vocab_size, width, dtype=dtype),
        embedding_scale=config.embedding_scale,
        layers=[layer(is_moe=each.is_moe) for each in config.layers],
        norm=empty(width),
        head=empty(config.vocab_size, width, dtype=dtype),
    )
    decoder = Decoder(config, weights)
    decoder.forward_pass = FusedPass(config, choices)
    return decoder


def batch_of(*sequences: tuple[int, int], block_size: int = 16) -> ForwardBatch:
    """Of sequences with so many new tokens, and so much context with them. Blocks may overlap."""
    lengths, seq_lens = (np.array(column, np.int32) for column in zip(*sequences, strict=True))
    ends = np.cumsum(lengths, dtype=np.int32)
    num_tokens, num_columns = int(ends[-1]), -(-int(seq_lens.max()) // block_size)
    positions = np.concatenate([np.arange(end - new, end) for new, end in sequences])
    return replace(
        _dummy_batch(num_tokens),
        positions=positions,
        slot_mapping=positions,
        cu_seqlens_q=np.concatenate([[0], ends]).astype(np.int32),
        seq_lens=seq_lens,
        block_tables=np.tile(np.arange(num_columns, dtype=np.int32), (len(sequences), 1)),
        logits_rows=ends.astype(np.int64) - 1,
    )


def random_sequence(rng: random.Random, most_new: int) -> tuple[int, int]:
    """Decoding, a prompt's last few tokens, a chunk of it, or a whole one."""
    few, many = rng.randint(2, 8), int(2 ** rng.uniform(3.2, 11))
    new = min(rng.choice([1, 1, 1, few, many, many]), most_new)
    before = 0 if new > 1 and rng.random() < 0.5 else int(2 ** rng.uniform(0, 13.5))
    return new, new + before


def random_batch(rng: random.Random) -> ForwardBatch:
    """A decode batch, prompts, or both."""
    count = rng.choice([1, 1, 2, 4, 16, 64, 200])
    most_new = 1 if rng.random() < 0.3 else 4096 // count
    return batch_of(*(random_sequence(rng, most_new) for _ in range(count)))


@dataclass(frozen=True, slots=True)
class Recorder(Choices):
    """Choices that run nothing, and remember what they were to run."""

    launches: list[Launch] = field(default_factory=list)

    def run(self, *launches: Launch) -> None:
        self.launches.extend(launches)


class Worker:
    """Runs steps of a model, and copies blocks as its transfers do."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, cache: CacheShape, choices: Choices) -> None:
        self._choices = choices
        self._cache = KVCache(cache, META)
        self._decoder = decoder_of(config, dtype, choices)
        self._staging = KvStaging(cache, 4096, META)

    def run(self, batch: ForwardBatch, *, is_staged: bool) -> None:
        """One step; a vendor's operators take the place of two kernels in every other one."""
        staged = self._staging.begin(batch, 9) if is_staged else None
        inputs = self._decoder.prepare(batch, self._cache.shape.block_size, staged)
        for crossing in ({}, {EMBED_RMS_NORM_QKV: None, PREFILL_ATTENTION: None}):
            choices = replace(self._choices, crossings=crossing)
            self._decoder.forward_pass = FusedPass(self._decoder.config, choices)
            plan = self._decoder.forward_pass.plan(batch, self._cache.shape.block_size, META)
            self._decoder.forward(replace(inputs, plan=plan), self._cache)

    def transfer(self, rng: random.Random) -> None:
        """Sends some blocks of some layers, and receives some from a peer with another cache."""
        cache_NL2Kbh = self._cache.logical
        _, num_layers, *block = cache_NL2Kbh.shape
        first, count = rng.randrange(num_layers), rng.randint(1, 40)
        layers = slice(first, rng.randint(first + 1, num_layers))
        ids_n = torch.arange(count, dtype=torch.int32, device=META)
        wire_nL2Kbh = self._wire(count, layers, block, cache_NL2Kbh.dtype, self._cache.shape.layout)
        gather_blocks(cache_NL2Kbh[:, layers], ids_n, wire_nL2Kbh, choices=self._choices)
        layout = rng.choice(["HND", "NHD"])
        frame_nL2Kbh = self._wire(count + 3, layers, block, rng.choice(DTYPES), layout)
        if rng.random() < 0.5:
            by_layers = self._wire(
                layers.stop - first, slice(0, count + 3), block, frame_nL2Kbh.dtype, layout
            )
            frame_nL2Kbh = by_layers.transpose(0, 1)
        scatter_blocks(frame_nL2Kbh[3:], ids_n, cache_NL2Kbh[:, layers], choices=self._choices)

    def _wire(
        self, count: int, inner: slice, block: list[int], dtype: torch.dtype, layout: str
    ) -> torch.Tensor:
        two, heads, slots, width = block
        shape = (count, inner.stop - inner.start, two)
        if layout == "HND":
            return empty(*shape, heads, slots, width, dtype=dtype)
        return empty(*shape, slots, heads, width, dtype=dtype).transpose(3, 4)


def cache_of(config: ModelConfig, dtype: torch.dtype, layout: str, num_blocks: int) -> CacheShape:
    return CacheShape(
        num_blocks=num_blocks,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=16,
        head_dim=config.head_dim,
        dtype=dtype,
        layout=layout,
    )


def programs() -> dict[str, dict[str, Any]]:
    """By model and device: how many programs a start and then random steps ask the dispatcher for."""
    keys: dict[tuple[str, str], str] = {}

    def take(key: str, fn: Any, repr: str, **_: Any) -> bool:  # noqa: A002  (Triton's name)
        keys[fn.name, key] = repr
        return True

    knobs.runtime.jit_cache_hook = take
    found = {}
    for index, device in enumerate(DEVICES):
        if device.name not in ("sm_90", "gfx942"):
            continue
        driver.set_active(AbsentDriver(device.target, index))
        for seed, (name, config) in enumerate(CONFIGS.items()):
            rng, layout = random.Random(seed), ("HND", "NHD")[seed % 2]
            kv_dtype = torch.float16 if name == "mistral" else torch.bfloat16
            cache = cache_of(config, kv_dtype, layout, num_blocks=20_000)
            keys.clear()
            choices = tune_model(config, cache, torch.bfloat16, META, timer=lambda _, rng=rng: rng.random())
            started = dict(keys)
            keys.clear()
            worker = Worker(config, torch.bfloat16, cache, choices)
            for number in range(NUM_BATCHES):
                worker.run(random_batch(rng), is_staged=number % 2 == 0)
                worker.transfer(rng)
            new = sorted(keys[key] for key in keys.keys() - started.keys())
            found[f"{name} {device.name}"] = {"started": len(started), "served": len(keys), "new": new}
    return found


def calls() -> dict[str, dict[str, list[str]]]:
    """By model: calls that only the pass makes, and calls that only measurements are made of."""
    new = (2048, 512, 33, 9)
    alone = [batch_of((tokens, tokens + before)) for tokens in new for before in (0, 5000)]
    few = [batch_of((tokens, context)) for tokens in (1, 2, 4, 8) for context in (8, 5000)]
    together = [batch_of((1, 200), (3, 5000), (40, 40), (40, 5000)), batch_of(*[(1, 9000)] * 200)]
    steps = [
        Step(num_sequences=1, new_tokens=tokens, context=tokens + before)
        for tokens in (*new, 1, 2, 4, 8)
        for before in (0, 5000)
    ]
    found = {}
    for name, config in CONFIGS.items():
        cache = cache_of(config, torch.bfloat16, "HND", 20_000)
        recorder = Recorder()
        worker = Worker(config, torch.bfloat16, cache, recorder)
        for batch in (*alone, *few, *together):
            for is_staged in (False, True):
                worker.run(batch, is_staged=is_staged)
        made = set(map(described, recorder.launches))
        logical = KVCache(cache, META).logical
        launches = (
            launch for step in steps for launch in model_launches(config, step, logical, torch.bfloat16)
        )
        measured = {described(launch) for launch in launches if launch.kernel.name != "block_copy"}
        found[name] = {
            "number": len(made),
            "pass alone": sorted(made - measured),
            "measured alone": sorted(measured - made),
        }
    return found


def shapes() -> dict[str, Any]:
    """Of steps of all models: how many shapes there are, and those of which the compiler is given several."""
    steps = [
        *STEPS,
        *(Step(num_sequences=1, new_tokens=n, context=n + c) for n in (3, 7, 300) for c in (9, 7000)),
    ]
    number, torn = 0, []
    for name, config in CONFIGS.items():
        logical = KVCache(cache_of(config, torch.bfloat16, "HND", 20_000), META).logical
        sources: dict[tuple[str, Any], set[str]] = {}
        for step in steps:
            for launch in model_launches(config, step, logical, torch.bfloat16):
                source, _ = launch.source(DEVICES[1].target, launch.kernel.configs_for(launch.shape)[0])
                sources.setdefault((launch.kernel.name, launch.shape), set()).add(source.hash())
        number += len(sources)
        torn += [f"{name}: {kernel} {dict(shape)}" for (kernel, shape), of in sources.items() if len(of) > 1]
    return {"number": number, "torn": torn}


def described(launch: Launch) -> str:
    """A call's kernel, constants and signature."""
    source, _ = launch.source(DEVICES[1].target, UNMEASURED.config(launch))
    return f"{launch.kernel.name} {dict(launch.constants)} {source.signature}"


if __name__ == "__main__":
    json.dump({"programs": programs, "calls": calls, "shapes": shapes}[sys.argv[1]](), sys.stdout)
