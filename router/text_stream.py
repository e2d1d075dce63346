"""Text of one answer as its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """An incremental detokenizer. A character comes with the token that completes it.

    tokenizer: shared, never changed.
    skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._length = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text these tokens complete; "" while a character is incomplete."""
        self._token_ids += token_ids
        parts = [self._decoder.step(self._tokenizer, token_id) or "" for token_id in token_ids]
        text = "".join(parts)
        self._length += len(text)
        return text

    def flush(self) -> str:
        """What was held back, once no more tokens come: an incomplete character shows as U+FFFD."""
        text: str = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        return text[self._length :]
