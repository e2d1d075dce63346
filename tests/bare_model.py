"""The least that a model folder's config.json may say. Its weights are none: it opens, and is never run."""

from __future__ import annotations

import json

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 4,
    "max_position_embeddings": 8,
}
TEXT = json.dumps(CONFIG)
