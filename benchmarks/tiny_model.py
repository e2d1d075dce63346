"""A model folder that a router can serve and nobody can run: a byte tokenizer, sizes, one byte of weights.

For benchmarks whose workers are simulated. The fingerprint follows from the folder alone.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.models import ModelDir

MAX_MODEL_LEN = 131_072
BOS, EOS = "<s>", "</s>"


def make_model(folder: Path) -> ModelDir:
    """Writes the folder, which must not exist, and opens it."""
    folder.mkdir(parents=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((BOS, EOS, *letters))}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": len(vocab),
        "max_position_embeddings": MAX_MODEL_LEN,
        "bos_token_id": vocab[BOS],
        "eos_token_id": vocab[EOS],
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"x")
    return ModelDir.open(folder)
