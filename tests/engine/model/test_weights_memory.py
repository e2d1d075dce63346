"""Loading holds the weights once, and one layer of the file besides."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

HIDDEN, INNER, NUM_LAYERS, VOCAB = 256, 4096, 16, 64


# A model of one layer is loaded first: what torch maps and allocates when it first computes differs between
# machines. VmHWM is the most that ever was resident; writing 5 to clear_refs begins it anew.
LOAD = """
import sys
from pathlib import Path
from engine.config import EngineConfig
from engine.load import load_engine

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return [1024 * int(sizes[name].split()[0]) for name in ("VmHWM", "RssAnon", "RssFile")]

def load(model):
    # Without a compiler of kernels, which frees more than the second model takes.
    config = EngineConfig(model=model, dtype=sys.argv[3], kv_cache_bytes=1 << 20, threads=1, kernels="torch")
    return load_engine(config)

first = load(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")
before = resident()
runner = load(sys.argv[2])
print(*before, *resident())
"""


def layer(index: int) -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{index}."
    shapes = {"q_proj": (64, HIDDEN), "k_proj": (64, HIDDEN), "v_proj": (64, HIDDEN), "o_proj": (HIDDEN, 64)}
    tensors = {f"{prefix}self_attn.{name}.weight": torch.rand(shape) for name, shape in shapes.items()}
    for name, shape in {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}.items():
        tensors[f"{prefix}mlp.{name}_proj.weight"] = torch.rand(shape)
    for name in ("input", "post_attention"):
        tensors[f"{prefix}{name}_layernorm.weight"] = torch.ones(HIDDEN)
    return tensors


def write_checkpoint(folder: Path, num_layers: int) -> Path:
    """A Llama in fp32 and in three shards, of which the first has the embedding."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    embedding = {
        "model.embed_tokens.weight": torch.rand(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    weight_map = {}
    for shard in range(3):
        tensors = embedding if shard == 0 else {}
        for index in range(shard, num_layers, 3):
            tensors = tensors | layer(index)
        name = f"model-{shard + 1}-of-3.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A model of one layer, and one of 200 MB; removed with the module: it is large."""
    folder = tmp_path_factory.mktemp("wide")
    yield write_checkpoint(folder / "one", 1), write_checkpoint(folder / "wide", NUM_LAYERS)
    shutil.rmtree(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_memory_is_that_of_the_weights_and_one_layer(
    checkpoints: tuple[Path, Path], dtype: str, itemsize: int
) -> None:
    weights = itemsize * NUM_LAYERS * (3 * HIDDEN * INNER + 4 * 64 * HIDDEN)
    child = subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, checkpoints), dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    peak_before, *before, peak, anonymous, mapped = map(int, child.stdout.split())

    # Beside the weights: the cache of 1 MiB.
    assert peak - peak_before <= 1.25 * weights
    assert anonymous + mapped - sum(before) <= 1.1 * weights
    assert anonymous - before[0] >= weights, "the weights are not in memory of their own"
