"""A model folder of the tattle-tale: what real workers need to serve it, and no weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.tiny_llama import TEMPLATE, byte_tokenizer

# Layers, keys and values, kv heads, head dim.
KV_SHAPE = (2, 2, 1, 8)


def write_tattletale(folder: Path, *, max_model_len: int = 2048) -> int:
    """Writes the folder; returns the size of the vocabulary."""
    tokenizer = byte_tokenizer()
    vocab_size: int = tokenizer.get_vocab_size()
    num_layers, _, num_kv_heads, head_dim = KV_SHAPE
    config = {
        "architectures": ["TattleTaleForCausalLM"],
        "hidden_size": head_dim,
        "intermediate_size": 1,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_kv_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_model_len,
        "eos_token_id": 0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # Peers recognise each other's model by its weights file, so there has to be one.
    save_file({"tattle_tale": torch.zeros(1)}, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return vocab_size
