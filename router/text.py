"""Text in, token ids out, and back: tokenizer, chat template, incremental detokenization.

Workers see token ids only. The tokenizer is shared and never mutated; long
texts are encoded off the event loop, wherever the entry point says.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from baton.errors import InvalidRequest, ModelError
from baton.models import ModelDir

# Below this, encoding takes less time than handing it to another thread.
INLINE_CHARS = 2_000
# Text averages a few characters per token in any vocabulary; this bound is far above
# that and only guards against absurd inputs.
MAX_CHARS_PER_TOKEN = 64
MAX_MESSAGES = 1_000

Offload = Callable[[Callable[[], list[int]]], Awaitable[list[int]]]


class Text:
    """Tokenizer and chat template of one model.

    offload: runs a function away from the event loop; used for texts over INLINE_CHARS.
    """

    def __init__(self, model: ModelDir, offload: Offload) -> None:
        self._offload = offload
        self._tokenizer = _read_tokenizer(model.tokenizer_path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = _compile(model)
        self._special = {
            f"{name}_token": self._tokenizer.id_to_token(token_id) or ""
            for name, token_id in (
                ("bos", model.bos_token_id),
                ("eos", next(iter(model.eos_token_ids), None)),
            )
            if token_id is not None
        }

    async def encode(self, text: str, max_tokens: int, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; raises InvalidRequest for one that cannot fit max_tokens."""
        self._check_size(len(text), max_tokens)
        if len(text) <= INLINE_CHARS:
            return self._encode(text, add_special_tokens)
        return await self._offload(partial(self._encode, text, add_special_tokens))

    async def encode_chat(self, messages: list[dict[str, str]], max_tokens: int) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn."""
        self._check_size(sum(len(message["content"]) for message in messages), max_tokens)
        return await self.encode(self.render(messages), max_tokens, add_special_tokens=False)

    def render(self, messages: list[dict[str, str]]) -> str:
        """The conversation as the model's chat template writes it; raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; send text instead", field="chat")
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InvalidRequest(
                f"the chat has {len(messages)} messages; send between 1 and {MAX_MESSAGES}", field="chat"
            )
        try:
            text: str = self._template.render(messages=messages, add_generation_prompt=True, **self._special)
            return text
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", field="chat") from error

    def stream(self) -> TextStream:
        """An incremental detokenizer for one answer."""
        return TextStream(self._tokenizer)

    def _check_size(self, num_chars: int, max_tokens: int) -> None:
        if num_chars > max_tokens * MAX_CHARS_PER_TOKEN:
            raise InvalidRequest(
                f"the prompt has {num_chars} characters; this model takes at most {max_tokens} tokens",
                field="prompt",
            )

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


class TextStream:
    """Text of one answer as its tokens arrive. Special tokens are left out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._length = 0

    def push(self, token_ids: list[int]) -> str:
        """The text these tokens complete; "" while a character is incomplete."""
        self._token_ids += token_ids
        parts = [self._decoder.step(self._tokenizer, token_id) or "" for token_id in token_ids]
        text = "".join(parts)
        self._length += len(text)
        return text

    def flush(self) -> str:
        """What was held back, once no more tokens come: an incomplete character shows as U+FFFD."""
        text: str = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        return text[self._length :]


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path} is not a readable tokenizer ({error}); pull the model again") from error


def _compile(model: ModelDir) -> Any:
    if model.chat_template is None:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(model.chat_template)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"{model.path}: the chat template cannot be read ({error}); pull the model again"
        ) from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
