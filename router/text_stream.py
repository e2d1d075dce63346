"""Text of one answer as its tokens arrive.

Owns which text comes with which token. Tokens that are bytes are decoded here: a character comes with the
token that completes it, and bytes that are none show as U+FFFD, by Unicode's own practice. Other tokens are
written by the tokenizer's decoder, behind the one before them.

The pieces together are what the tokenizer makes of the whole answer, with one difference. A tokenizer with
a token per byte (Llama 2's manner) shows a run of them that is no UTF-8 as U+FFFD throughout; here the
characters in it stay what they are, for they are with the client already.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from router.token_texts import TokenTexts

_Utf8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"
# A character has four bytes at most, so that no more tokens than that wait for one.
_MOST_WAITING = 4


class TextStream:
    """An incremental detokenizer. What it makes of tokens does not depend on how they are cut into pushes.

    texts: the tokenizer's, shared.
    skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool = True) -> None:
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        self._bytes = _Utf8("replace")
        # The token whose text is out, which shows the decoder that it is not at the beginning; and those
        # after it that may be a part of a character, in the manner of a decoder that is not known here.
        self._before: list[int] = []
        self._waiting: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text these tokens complete; "" while a character is incomplete."""
        return "".join([self._step(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """What was held back, once no more tokens come: an incomplete character shows as U+FFFD."""
        return self._written() + self._end_bytes()

    def _step(self, token_id: int) -> str:
        texts = self._texts
        if not texts.has(token_id) or (self._skip_special_tokens and texts.is_special(token_id)):
            return ""
        if (piece := texts.byte_piece(token_id)) is not None:
            text = self._written()
            # A decoder may drop the first blank of all, whatever wrote it.
            is_first_blank = piece == b" " and not self._before and not texts.is_byte_level
            text += texts.decode([token_id]) if is_first_blank else self._bytes.decode(piece)
            self._before = [token_id]
            return text
        text = self._end_bytes()
        self._waiting.append(token_id)
        if len(self._waiting) < _MOST_WAITING and texts.decode(self._waiting).endswith(_REPLACEMENT):
            return text
        return text + self._written()

    def _written(self) -> str:
        """The text of the tokens that wait, as the decoder writes it behind the one before them."""
        if not self._waiting:
            return ""
        waiting, self._waiting = self._waiting, []
        prefix, whole = self._texts.decode(self._before), self._texts.decode(self._before + waiting)
        self._before = waiting[-1:]
        if whole.startswith(prefix):
            return whole[len(prefix) :]
        # What comes later changed what is out: there it stays as it was sent.
        return self._texts.decode(waiting)

    def _end_bytes(self) -> str:
        text = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        return text
