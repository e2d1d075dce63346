"""Writes GGUF files of tiny random Llama models, the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTES = list(bytes_to_unicode().values())
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Each merge makes a token of its own; "1 2" is there to be prevented by a digit splitter.
MERGES = ["1 2", "h e", "l l", "he ll", "hell o", "Ġ hello"]
TOKENS = [*CONTROL, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

_TOP_LEVEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama(num_heads: int = 8, num_kv_heads: int = 2, head_dim: int = 8) -> LlamaForCausalLM:
    """A random two-layer Llama with tied embeddings, fp32 weights that bf16 holds exactly."""
    torch.manual_seed(num_heads * 100 + num_kv_heads)
    config = LlamaConfig(
        hidden_size=num_heads * head_dim,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=len(TOKENS),
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    # Parameter by parameter: casting the module would round the rotary frequencies as well.
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def write_gguf(path: Path, model: LlamaForCausalLM, *, pre: str = "smollm") -> None:
    """Writes the model as llama.cpp's convert_hf_to_gguf.py would, unquantized."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_metadata(writer, model.config, pre)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(gguf_name(name), _as_llama_cpp(name, tensor.numpy(), model.config))
    finish(writer)


def write_quantized(
    path: Path, model: LlamaForCausalLM, kind: gguf.GGMLQuantizationType
) -> dict[str, np.ndarray]:
    """Like write_gguf with matrices quantized; returns the packed bytes by Hugging Face name."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_metadata(writer, model.config, "smollm")
    packed = {}
    for name, tensor in model.state_dict().items():
        values = _as_llama_cpp(name, tensor.numpy(), model.config)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        elif name != "lm_head.weight":
            packed[name] = gguf.quants.quantize(values, kind)
            writer.add_tensor(gguf_name(name), packed[name], raw_dtype=kind)
    finish(writer)
    return packed


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_LEVEL:
        return f"{_TOP_LEVEL[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def _as_llama_cpp(name: str, values: np.ndarray, config: LlamaConfig) -> np.ndarray:
    if "q_proj" in name:
        return _permute(values, config.num_attention_heads)
    return _permute(values, config.num_key_value_heads) if "k_proj" in name else values


def _permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    # Verbatim from llama.cpp's LlamaModel.permute.
    return (
        values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
        .swapaxes(1, 2)
        .reshape(values.shape)
    )


def _write_metadata(writer: gguf.GGUFWriter, config: LlamaConfig, pre: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
