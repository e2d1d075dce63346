"""Builds a tokenizer.json from the vocabulary inside a GGUF file.

Owns what the byte-level BPE tables of a GGUF file mean. Knows nothing of weights.
The tokenizer is built from the tokens and merges themselves, because a GGUF file
names its pre-tokenizer only by a label ("smollm") and generic loaders fall back to
one that keeps runs of digits together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from baton.errors import ModelError

# tokenizer.ggml.token_type, from llama.h: enum llama_token_type.
_CONTROL = 3
_USER_DEFINED = 4


class Metadata(Protocol):
    """The key/value part of a GGUF file."""

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key, or the default."""

    def require(self, key: str) -> Any:
        """Value of a key; raises ModelError naming it when absent."""


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer a byte-level BPE GGUF file describes.

    Control tokens encode to their one id and are skipped when decoding. Raises
    ModelError for another kind of vocabulary or an unknown pre-tokenizer.
    """
    tokens: Sequence[str] = metadata.require("tokenizer.ggml.tokens")
    tokenizer = Tokenizer(_bpe(metadata, tokens))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", ()))
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos_id = int(metadata.require("tokenizer.ggml.bos_token_id"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[bos_id], "$A"], special_tokens=[(tokens[bos_id], bos_id)]
        )
    return tokenizer


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """The tokenizer_config.json that goes with build_tokenizer's tokenizer."""
    tokens: Sequence[str] = metadata.require("tokenizer.ggml.tokens")
    special = {
        "bos_token": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token": metadata.get("tokenizer.ggml.eos_token_id"),
        "unk_token": metadata.get("tokenizer.ggml.unknown_token_id"),
        "pad_token": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata.require("llama.context_length")),
        **{name: tokens[int(index)] for name, index in special.items() if index is not None},
    }


def _bpe(metadata: Metadata, tokens: Sequence[str]) -> models.BPE:
    kind = metadata.require("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"tokenizer.ggml.model is {kind!r}; only byte-level BPE ('gpt2') can be converted. "
            "Pull a repository that has tokenizer.json"
        )
    merges = [merge.split(" ") for merge in metadata.require("tokenizer.ggml.merges")]
    if any(len(merge) != 2 for merge in merges):
        raise ModelError("tokenizer.ggml.merges has an entry that is not two tokens; the file is damaged")
    vocab = {token: index for index, token in enumerate(tokens)}
    return models.BPE(vocab=vocab, merges=[(left, right) for left, right in merges])


def _pre_tokenizer(metadata: Metadata) -> pre_tokenizers.PreTokenizer:
    """Splitting rules by label; llama.cpp's llama-vocab.cpp lists their regular expressions."""
    label = metadata.require("tokenizer.ggml.pre")
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)), use_regex=True
    )
    if label == "gpt-2":
        return byte_level
    if label == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    raise ModelError(
        f"tokenizer.ggml.pre is {label!r}; only 'gpt-2' and 'smollm' can be converted. "
        "Pull a repository that has tokenizer.json"
    )


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], token_types: Sequence[int]) -> None:
    for token, token_type in zip(tokens, token_types, strict=False):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
