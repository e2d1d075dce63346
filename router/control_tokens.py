"""Keeps what people write in a chat from becoming control tokens.

A tokenizer cannot tell an end-of-turn marker that the template wrote from one that
somebody typed: both are the same text. So what was typed is hidden from the template
behind a sentinel that nobody typed, the genuine control tokens are located in the
rendered text, and then the text is encoded once more, with the typed markers back in
place, by a tokenizer that takes no text for a control token except one private
boundary, which stands for the genuine ones.

Knows tokenizers; neither templates nor requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from baton.errors import InvalidRequest

# Unicode noncharacters: never assigned, not meant for interchange. Where control text is hidden, no
# message may have them: neither alone nor together could it forge what stands for something else.
BOUNDARY = "\ufdd0boundary\ufdd1"
SENTINEL = "\ufdd2"
_NONCHARACTERS = re.compile("[\ufdd0-\ufdd2]")
_SENTINELS = re.compile(rf"{SENTINEL}(\d+){SENTINEL}")
# Its words are the model's own: what the model shows as text there may be what it was.
ASSISTANT = "assistant"

Messages = Sequence[Mapping[str, str]]


class Hidden:
    """Messages without the control text that people wrote, and what stands for it.

    messages: with a sentinel in place of each piece.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = []
        self._pieces: list[str] = []
        self._numbers: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Whether anything had to be hidden."""
        return bool(self._pieces)

    def sentinel(self, piece: str) -> str:
        """What stands for a piece: a text that no message has."""
        if piece not in self._numbers:
            self._numbers[piece] = len(self._pieces)
            self._pieces.append(piece)
        return f"{SENTINEL}{self._numbers[piece]}{SENTINEL}"

    def reveal(self, text: str) -> str:
        """The text with every piece back in its place."""
        return _SENTINELS.sub(lambda match: self._pieces[int(match[1])], text)


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

    def hide(self, messages: Messages) -> Hidden:
        """The messages as the template may see them; raises InvalidRequest for noncharacters beside them."""
        hidden = Hidden()
        for message in messages:
            hidden.messages.append({**message, "content": self._hide(message, hidden)})
        if hidden and any(_NONCHARACTERS.search(message["content"]) for message in messages):
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

    def _hide(self, message: Mapping[str, str], hidden: Hidden) -> str:
        matcher = self._in_assistant if message["role"] == ASSISTANT else self._elsewhere
        content = matcher.sub(lambda match: hidden.sentinel(match[0]), message["content"])
        normalizer = self._tokenizer.normalizer
        if normalizer is not None and matcher.search(normalizer.normalize_str(content)):
            # It becomes control text only once it is normalized, so its place is unknown.
            return hidden.sentinel(message["content"])
        return content


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
