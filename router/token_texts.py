"""The bytes that each token stands for, by itself.

Owns the ways in which tokenizers write bytes as text: the byte alphabet of GPT-2, and the byte tokens and the
blank of SentencePiece. Which characters an answer has in the end is router/text_stream.py's to say: there a
character may take several tokens, and a first blank may be left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK: Final = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: a printable byte of Latin-1 is its own character, the others are those from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_ALPHABET: Final = _byte_alphabet()


class TokenTexts:
    """The tokens of one tokenizer as bytes.

    tokenizer: shared, never changed.
    is_byte_level: the text of an answer is that of its tokens' bytes, joined, and nothing else.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # What is added to a vocabulary is text as it stands, control tokens above all.
        added = tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        decoders = set(_types(json.loads(tokenizer.to_str()).get("decoder")))
        self._is_byte_level = "ByteLevel" in decoders
        self.is_byte_level = decoders <= {"ByteLevel", "Sequence", "Fuse"} and self._is_byte_level
        self._has_blanks = bool(decoders & {"Metaspace", "Replace"})
        self._has_byte_tokens = "ByteFallback" in decoders

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that the tokenizer lacks. Not always whole characters."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._is_byte_level:
            return b"".join(_of_alphabet(char) for char in token)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token.replace(_BLANK, " ") if self._has_blanks else token).encode()

    def byte_piece(self, token_id: int) -> bytes | None:
        """The bytes of a token that may be part of a character; None where the decoder has to write it."""
        if self.is_byte_level:
            return self.bytes_of(token_id)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(self.name_of(token_id))):
            return bytes([int(match[1], 16)])
        return None

    def has(self, token_id: int) -> bool:
        """Whether the tokenizer has that token: models pad their vocabularies."""
        return self._tokenizer.id_to_token(token_id) is not None

    def is_special(self, token_id: int) -> bool:
        """Whether it is one of those that texts are usually shown without."""
        return token_id in self._special

    def decode(self, token_ids: Sequence[int]) -> str:
        """The tokenizer's own text of these tokens, special ones too."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def name_of(self, token_id: int) -> str:
        """The token itself, as its vocabulary has it; "" for an id that the tokenizer lacks."""
        return self._tokenizer.id_to_token(token_id) or ""


def _of_alphabet(char: str) -> bytes:
    byte = _ALPHABET.get(char)
    return char.encode() if byte is None else bytes([byte])


def _types(node: Any) -> Iterator[str]:
    """The types of a decoder and of those inside it."""
    if isinstance(node, dict):
        yield str(node.get("type"))
        for inner in node.get("decoders", ()):
            yield from _types(inner)
