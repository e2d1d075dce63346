"""Text in, token ids out, and back.

Workers see token ids only. Tokenizers are shared and never changed; long texts are
encoded off the event loop, wherever the entry point says.

A text prompt is read like text that the model was trained on: control text in it is
control tokens, and the tokenizer's own special tokens are added. In a chat, control
tokens come from the template alone. Neither begins with two BOS.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer

from baton.errors import ModelError, PromptTooLong
from baton.models import ModelDir
from baton.v1.inference_service_pb2 import Chat
from router.chat_template import ChatTemplate
from router.control_tokens import ControlTokens
from router.conversation import Conversation, num_chars
from router.text_stream import TextStream
from router.token_texts import TokenTexts
from router.tool_calls import tool_format

# Below this, encoding takes less time than handing it to another thread.
INLINE_CHARS = 2_000
# Text averages a few characters per token in any vocabulary; this bound is far above
# that and only guards against absurd inputs.
MAX_CHARS_PER_TOKEN = 64

ResultT = TypeVar("ResultT")


class Offload(Protocol):
    """Runs work away from the event loop, on a bounded number of threads."""

    def __call__(self, work: Callable[[], ResultT], /) -> Awaitable[ResultT]:
        """The result of the work, or what it raised."""


class Text:
    """Tokenizer and chat template of one model.

    offload: runs a function away from the event loop, on a bounded number of threads; used
        for texts over INLINE_CHARS.
    tool_format: how the model writes calls of tools, or None where that is not known.
    texts: its tokens, one by one.
    """

    def __init__(self, model: ModelDir, offload: Offload) -> None:
        self._offload = offload
        self._tokenizer = _read_tokenizer(model.tokenizer_path)
        self._template = ChatTemplate(model, _special_tokens(model, self._tokenizer))
        self._controls = ControlTokens(self._tokenizer, self._template.source)
        self.tool_format = tool_format(self._template.source, self._tokenizer)
        markers = self.tool_format.special_markers if self.tool_format else ()
        self.texts = TokenTexts(self._tokenizer)
        self._with_markers = TokenTexts(_without_special(self._tokenizer, markers)) if markers else self.texts
        added = self._tokenizer.encode("").ids
        self._bos_token_id = added[0] if added else model.bos_token_id

    @property
    def tokenizer(self) -> Tokenizer:
        """Shared; nobody changes it."""
        return self._tokenizer

    async def encode(self, text: str, max_tokens: int) -> list[int]:
        """Token ids of a text prompt; raises InvalidRequest for one that cannot fit max_tokens."""
        return await self._run(partial(self._encode, text), len(text), max_tokens)

    async def encode_chat(self, chat: Chat, max_tokens: int) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn; raises InvalidRequest."""
        self._template.check_present()
        return await self._run(partial(self._encode_chat, chat, max_tokens), num_chars(chat), max_tokens)

    def stream(self, *, skip_special_tokens: bool = True, keep_tool_markers: bool = False) -> TextStream:
        """An incremental detokenizer for one answer.

        keep_tool_markers: the special tokens that mark calls of tools are in the text all the same.
        """
        texts = self._with_markers if keep_tool_markers else self.texts
        return TextStream(texts, skip_special_tokens=skip_special_tokens)

    async def _run(self, work: Callable[[], list[int]], length: int, max_tokens: int) -> list[int]:
        _check_length(length, max_tokens)
        return work() if length <= INLINE_CHARS else await self._offload(work)

    def _encode(self, text: str) -> list[int]:
        return self._with_one_bos(self._tokenizer.encode(text).ids)

    def _encode_chat(self, chat: Chat, max_tokens: int) -> list[int]:
        hidden = self._controls.hide(Conversation.read(chat))
        rendered = self._template.render(hidden.conversation)
        # A template may write more than it was given: by indenting, or by saying things twice.
        _check_length(len(rendered), max_tokens)
        return self._with_one_bos(self._controls.encode(rendered, hidden))

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """Without further BOS at the beginning, where text or template and the tokenizer each wrote one."""
        first = 0
        while ids[first : first + 2] == [self._bos_token_id] * 2:
            first += 1
        return ids[first:]


def _check_length(num_chars: int, max_tokens: int) -> None:
    if num_chars > max_tokens * MAX_CHARS_PER_TOKEN:
        raise PromptTooLong(
            f"the prompt has {num_chars} characters; this model takes at most {max_tokens} tokens",
            field="prompt",
        )


def _without_special(tokenizer: Tokenizer, texts: Collection[str]) -> Tokenizer:
    """The same tokenizer, to which these tokens are no special ones."""
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in texts
    changed: Tokenizer = Tokenizer.from_str(json.dumps(content))
    return changed


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path} is not a readable tokenizer ({error}); pull the model again") from error
    # Both would be state that one call leaves to the next; here, before it is shared, is the only place.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(model: ModelDir, tokenizer: Tokenizer) -> dict[str, str]:
    """What a template knows as bos_token, eos_token and so on: tokenizer_config.json's, else by their ids."""
    written = _read_json(model.path / "tokenizer_config.json")
    ids = {"bos_token": model.bos_token_id, "eos_token": next(iter(model.eos_token_ids), None)}
    tokens = {
        name: tokenizer.id_to_token(token_id) or "" for name, token_id in ids.items() if token_id is not None
    }
    for name, token in written.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    """Content of a file that a model need not have."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); pull the model again") from error
    return content
