"""A tiny tokenizer and model folder: one token per byte or known word, special tokens around."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from baton.grammars import GrammarCompiler
from baton.models import ModelDir
from baton.v1.inference_service_pb2 import Chat
from router.grammars import GrammarCheck

ResultT = TypeVar("ResultT")

BOS, EOS = 0, 1
MAX_MODEL_LEN = 64
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ message['role'] }}:{{ message['content'] }};{% endfor %}"
)


def byte_tokenizer(*, with_bos: bool = True) -> Tokenizer:
    """One token per UTF-8 byte; ids 0 and 1 are <s> and </s>, byte b is 2 + its place in the alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": BOS, "</s>": EOS} | {char: 2 + index for index, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    return tokenizer


async def at_once(work: Callable[[], ResultT]) -> ResultT:
    """An Offload without a thread."""
    return work()


def grammar_check(model: ModelDir) -> GrammarCheck:
    """A real one, without a thread."""
    return GrammarCheck(GrammarCompiler(model.tokenizer_path, model.limits.vocab_size, [EOS]), at_once)


def chat_of(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    arguments: Mapping[str, Any] | None = None,
) -> Chat:
    """A chat on the wire, of what transformers' apply_chat_template takes."""
    chat = Chat(tools=map(json.dumps, tools), template_arguments=json.dumps(arguments) if arguments else "")
    for message in messages:
        calls = [
            {
                **call["function"],
                "id": call.get("id", ""),
                "arguments": json.dumps(call["function"]["arguments"]),
            }
            for call in message.get("tool_calls", ())
        ]
        chat.messages.add(**{**message, "tool_calls": calls})
    return chat


def ids_of(text: str) -> list[int]:
    """Ids by the definition of the byte alphabet, without the tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    char_of = {byte: chr(byte) for byte in printable}
    char_of |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [2 + alphabet.index(char_of[byte]) for byte in text.encode()]


def model_dir(folder: Path, *, template: str | None = TEMPLATE, with_bos: bool = True) -> ModelDir:
    """A folder that opens as a model; its weights are never read."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": MAX_MODEL_LEN,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer(with_bos=with_bos).save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"x")
    return ModelDir.open(folder)
