"""Converts a GGUF file of the Llama family into a Hugging Face model folder.

Run as `python -m engine.convert GGUF FOLDER`, a child process of `baton pull`, because
the command line itself never imports torch. Owns the names, shapes and permutation of
GGUF tensors; knows nothing of downloads or caches. Progress goes to standard output as
lines `progress DONE TOTAL`; an error is one line on standard error and exit status 1.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from baton.errors import ModelError
from engine.gguf_tokenizer import build_tokenizer, tokenizer_config

_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

Report = Callable[[int, int], None]


class GgufFile:
    """A GGUF file of architecture "llama", mapped into memory and open for reading.

    Raises ModelError, naming the key or tensor, for anything that cannot be converted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
        architecture = self.require("general.architecture")
        if architecture != "llama":
            raise ModelError(
                f"{path}: general.architecture is {architecture!r}; only 'llama' can be converted"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key, or the default."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """Value of a key; raises ModelError naming it when absent."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.path} has no {key}; it cannot be converted")
        return value

    @property
    def tensors(self) -> list[Any]:
        """The tensors' descriptions, in file order; data is read on use."""
        return list(self._reader.tensors)

    @property
    def tensor_names(self) -> set[str]:
        """Names of all tensors, in GGUF spelling."""
        return {tensor.name for tensor in self._reader.tensors}


def convert(source: Path, folder: Path, report: Report) -> None:
    """Writes config, bf16 weights, tokenizer and chat template into an existing folder.

    report(done, total) is called after each tensor. Raises ModelError for a file that
    cannot be converted faithfully; the folder is then incomplete and must be discarded.
    """
    model = GgufFile(source)
    config = model_config(model)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(model))
    build_tokenizer(model).save(str(folder / "tokenizer.json"))
    template = model.get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    # The metadata is what transformers asks for before it loads a file.
    weights_path = folder / "model.safetensors"
    save_file(read_weights(model, config, report), weights_path, metadata={"format": "pt"})
    # safetensors creates the file readable by its owner only; workers may run as another user.
    weights_path.chmod(0o644)


def model_config(model: GgufFile) -> dict[str, Any]:
    """The config.json of a GGUF file, as transformers' LlamaConfig reads it."""
    scaling = model.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(
            f"llama.rope.scaling.type is {scaling!r}; only plain rotary embeddings can be converted"
        )
    num_heads = int(model.require("llama.attention.head_count"))
    hidden_size = int(model.require("llama.embedding_length"))
    names = model.tensor_names
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden_size,
        "intermediate_size": int(model.require("llama.feed_forward_length")),
        "num_hidden_layers": int(model.require("llama.block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(model.get("llama.attention.head_count_kv", num_heads)),
        "head_dim": int(model.get("llama.rope.dimension_count", hidden_size // num_heads)),
        "vocab_size": int(model.get("llama.vocab_size", len(model.require("tokenizer.ggml.tokens")))),
        "max_position_embeddings": int(model.require("llama.context_length")),
        "hidden_act": "silu",
        "rms_norm_eps": shortest_float(model.require("llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {
            "rope_theta": shortest_float(model.get("llama.rope.freq_base", 10000.0)),
            "rope_type": "default",
        },
        "attention_bias": "blk.0.attn_q.bias" in names,
        "attention_dropout": 0.0,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": _optional_int(model.get("tokenizer.ggml.bos_token_id")),
        "eos_token_id": _optional_int(model.get("tokenizer.ggml.eos_token_id")),
        "pad_token_id": _optional_int(model.get("tokenizer.ggml.padding_token_id")),
        "use_cache": True,
    }


def shortest_float(value: float) -> float:
    """The shortest decimal that rounds to the same fp32: 9.999999747378752e-06 becomes 1e-05.

    GGUF stores fp32 where config.json had a decimal; this recovers the decimal.
    """
    return float(str(np.float32(value)))


def read_weights(model: GgufFile, config: dict[str, Any], report: Report) -> dict[str, torch.Tensor]:
    """All tensors under their Hugging Face names, dequantized to fp32 and rounded once to bf16."""
    weights: dict[str, torch.Tensor] = {}
    tensors = model.tensors
    for done, tensor in enumerate(tensors, start=1):
        name = hugging_face_name(tensor.name)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if ".q_proj." in name:
            values = unpermute(values, config["num_attention_heads"])
        elif ".k_proj." in name:
            values = unpermute(values, config["num_key_value_heads"])
        weights[name] = torch.tensor(values).to(torch.bfloat16)
        report(done, len(tensors))
    return weights


def hugging_face_name(name: str) -> str:
    """Parameter name in transformers' Llama for a GGUF tensor name; ModelError for an unknown one."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_LEVEL and kind == "weight":
        return f"{_TOP_LEVEL[stem]}.weight"
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _PER_LAYER:
        return f"model.layers.{match[1]}.{_PER_LAYER[match[2]]}.{match[3]}"
    raise ModelError(
        f"tensor {name} is not part of a plain Llama model; the file cannot be converted faithfully"
    )


def unpermute(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of a q or k projection, [num_heads * head_dim, ...], from interleaved to half-split rotary order.

    llama.cpp's convert_hf_to_gguf.py (LlamaModel.permute) stores each head's rows as pairs
    (0, head_dim/2), (1, head_dim/2 + 1), ...; num_heads is the tensor's own head count, which
    for k is the number of key/value heads.
    """
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _print_progress(done: int, total: int) -> None:
    sys.stdout.write(f"progress {done} {total}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Runs the conversion; returns the exit status."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m engine.convert GGUF FOLDER\n")
        return 2
    folder = Path(arguments[1])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        convert(Path(arguments[0]), folder, _print_progress)
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
