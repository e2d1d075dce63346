"""Keeps what people write in a chat from becoming control tokens.

A tokenizer cannot tell an end-of-turn marker that the template wrote from one that
somebody typed: both are the same text. So what was typed is hidden from the template
behind a sentinel that nobody typed, the genuine control tokens are located in the
rendered text, and then the text is encoded once more, with the typed markers back in
place, by a tokenizer that takes no text for a control token except one private
boundary, which stands for the genuine ones.

What people and tools wrote is every text of a conversation: contents, results, names and
arguments of calls, definitions of tools, variables of the template. Numbers and structure
stay as they are.

Knows tokenizers; neither templates nor requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from tokenizers import AddedToken, Tokenizer

from baton.errors import InvalidRequest
from router.conversation import Conversation, Message

# Unicode noncharacters: never assigned, not meant for interchange. Where control text is hidden, no
# message may have them: neither alone nor together could it forge what stands for something else.
BOUNDARY = "\ufdd0boundary\ufdd1"
SENTINEL = "\ufdd2"
_NONCHARACTERS = re.compile("[\ufdd0-\ufdd2]")
_SENTINELS = re.compile(rf"{SENTINEL}(\d+){SENTINEL}")
# What JSON writes as it is. The rest of a piece stays in sight, for a template that writes JSON to escape.
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
# Its words are the model's own: what the model shows as text there may be what it was.
ASSISTANT = "assistant"
# Names that templates look for, never what somebody made up.
_STRUCTURE = frozenset(
    {"type", "function", "name", "description", "parameters", "arguments", "id", "properties", "required"}
)


class Hidden:
    """A conversation without the control text that people wrote, and what stands for it.

    conversation: with a sentinel in place of each piece.
    has_noncharacters: whether a text has what could be taken for a sentinel.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.has_noncharacters = False
        self._pieces: list[str] = []
        self._numbers: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Whether anything had to be hidden."""
        return bool(self._pieces)

    def sentinel(self, piece: str) -> str:
        """What stands for a piece: a text that no message has."""
        if not _PLAIN.search(piece):
            return self._number(piece)
        return _PLAIN.sub(lambda match: self._number(match[0]), piece)

    def reveal(self, text: str) -> str:
        """The text with every piece back in its place."""
        return _SENTINELS.sub(lambda match: self._pieces[int(match[1])], text)

    def _number(self, piece: str) -> str:
        if piece not in self._numbers:
            self._numbers[piece] = len(self._pieces)
            self._pieces.append(piece)
        return f"{SENTINEL}{self._numbers[piece]}{SENTINEL}"


class ControlTokens:
    """The control tokens of one tokenizer.

    Those are its special tokens and, of its other added tokens, the ones that the chat
    template writes, such as tool-call markers. The latter are left alone in the
    assistant's own turns, for the model's answers show them as text.

    tokenizer: turns control text into control tokens; shared, never changed.
    template: source of the chat template, or "".
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        written = {token.content for token in added.values() if token.content in template}
        known = special | {text for text in written if text.strip()}
        self._ids = frozenset(token_id for token_id, token in added.items() if token.content in known)
        self._in_assistant = _matcher(special)
        self._elsewhere = _matcher(known)
        self._tokenizer = tokenizer
        self._literal = _literal(tokenizer, known)
        self._boundary_id = self._literal.token_to_id(BOUNDARY)

    def hide(self, conversation: Conversation) -> Hidden:
        """The conversation as the template may see it; raises InvalidRequest for noncharacters beside what
        is hidden."""
        hidden = Hidden(conversation)
        hide = partial(self._hide, matcher=self._elsewhere, hidden=hidden)
        hidden.conversation = Conversation(
            messages=[self._hide_message(message, hidden) for message in conversation.messages],
            tools=None if conversation.tools is None else _each_text(conversation.tools, hide),
            arguments={name: _each_text(value, hide) for name, value in conversation.arguments.items()},
        )
        if hidden and hidden.has_noncharacters:
            raise InvalidRequest("a message has Unicode noncharacters; leave them out", field="chat")
        return hidden

    def encode(self, rendered: str, hidden: Hidden) -> list[int]:
        """Token ids of the rendered messages: what was hidden as plain text, the template's control tokens
        as themselves."""
        encoding = self._tokenizer.encode(rendered, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if not hidden:
            return ids
        spans = zip(ids, encoding.offsets, strict=True)
        genuine = [(token_id, start, stop) for token_id, (start, stop) in spans if token_id in self._ids]
        parts, end = [], 0
        for _, start, stop in genuine:
            parts += [hidden.reveal(rendered[end:start]), BOUNDARY]
            end = stop
        parts.append(hidden.reveal(rendered[end:]))
        controls = iter(token_id for token_id, _, _ in genuine)
        literal = self._literal.encode("".join(parts), add_special_tokens=False).ids
        return [next(controls) if token_id == self._boundary_id else token_id for token_id in literal]

    def _hide_message(self, message: Message, hidden: Hidden) -> Message:
        matcher = self._in_assistant if message["role"] == ASSISTANT else self._elsewhere
        others = {name: value for name, value in message.items() if name not in ("role", "content")}
        return {
            "role": message["role"],
            "content": self._hide(message["content"], matcher=matcher, hidden=hidden),
            **_each_text(others, partial(self._hide, matcher=self._elsewhere, hidden=hidden)),
        }

    def _hide(self, text: str, *, matcher: re.Pattern[str], hidden: Hidden) -> str:
        hidden.has_noncharacters = hidden.has_noncharacters or bool(_NONCHARACTERS.search(text))
        rest = matcher.sub(lambda match: hidden.sentinel(match[0]), text)
        normalizer = self._tokenizer.normalizer
        if normalizer is not None and matcher.search(normalizer.normalize_str(rest)):
            # It becomes control text only once it is normalized, so its place is unknown.
            return hidden.sentinel(text)
        return rest


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """The same mappings and lists, with every text changed; of names, those that people made up."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each_text(item, change) for item in value]
    if isinstance(value, dict):
        return {
            name if name in _STRUCTURE else change(name): _each_text(item, change)
            for name, item in value.items()
        }
    return value


def _matcher(texts: set[str]) -> re.Pattern[str]:
    """Finds the longest of the texts, leftmost first, as the tokenizer does."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _literal(tokenizer: Tokenizer, known: set[str]) -> Tokenizer:
    """A tokenizer that reads control text as plain text, and only the boundary as a token of its own."""
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["special"] or token["content"] in known
    literal: Tokenizer = Tokenizer.from_str(json.dumps(content))
    literal.encode_special_tokens = True
    literal.add_tokens([AddedToken(BOUNDARY, special=False, normalized=False)])
    return literal
