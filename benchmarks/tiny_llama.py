"""A tiny random Llama in the Hugging Face layout with a byte-level tokenizer, for whole clusters.

Written to disk for the cluster, and returned as transformers' own, which knows the right answers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

CONTROL = ["<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_model(folder: Path, *, max_model_len: int = 2048) -> LlamaForCausalLM:
    """Writes the folder and returns the model: two layers, three heads, fp32, a token per byte."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=max_model_len,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return model


def byte_tokenizer() -> Tokenizer:
    """One token per byte, behind three control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*CONTROL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    return tokenizer
