"""Log-probabilities as OpenAI's two endpoints and vLLM write them.

Owns their shapes, and the rule for numbers that JSON does not have. Knows nothing of requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from baton.v1 import common_pb2
from router.text_stream import TextStream
from router.token_texts import TokenTexts

# OpenAI's word for "as good as never"; minus infinity is no JSON.
FLOOR: Final = -9999.0


def finite(logprob: float) -> float:
    """The number itself, or the floor."""
    return max(logprob, FLOOR) if math.isfinite(logprob) else FLOOR


class LogprobShapes:
    """Writes log-probabilities with the texts of their tokens."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def of_chat(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[common_pb2.TopLogprobs],
    ) -> dict[str, Any]:
        """choices[].logprobs of a chat."""
        content = []
        for place, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
            top = tops[place] if tops else common_pb2.TopLogprobs()
            entry = self._entry(token_id, logprob)
            entry["top_logprobs"] = [
                self._entry(other, value) for other, value in zip(top.token_ids, top.logprobs, strict=True)
            ]
            content.append(entry)
        return {"content": content, "refusal": None}

    def of_completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[common_pb2.TopLogprobs],
        offsets: Sequence[int],
    ) -> dict[str, Any]:
        """choices[].logprobs of a completion. offsets: where each token's text begins."""
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [finite(logprob) for logprob in logprobs],
            "top_logprobs": [
                self._likeliest(token_id, logprob, tops[place] if tops else common_pb2.TopLogprobs())
                for place, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
            ],
            "text_offset": list(offsets),
        }

    def of_prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[common_pb2.TopLogprobs]
    ) -> list[dict[str, Any]]:
        """vLLM's prompt_logprobs, of all tokens but the first: per token an object, by ids."""
        shaped = []
        for place, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
            top = tops[place] if tops else common_pb2.TopLogprobs()
            ranked = dict(zip(top.token_ids, top.logprobs, strict=True))
            entries = {token_id: self._ranked(token_id, logprob, [*ranked])} | {
                other: self._ranked(other, value, [*ranked]) for other, value in ranked.items()
            }
            shaped.append({str(token_id): entry for token_id, entry in entries.items()})
        return shaped

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self._texts.bytes_of(token_id)
        return {"token": _readable(piece, ""), "logprob": finite(logprob), "bytes": list(piece)}

    def _name(self, token_id: int) -> str:
        return _readable(self._texts.bytes_of(token_id), "bytes:")

    def _likeliest(self, token_id: int, logprob: float, top: common_pb2.TopLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the one that was taken."""
        pairs = [*zip(top.token_ids, top.logprobs, strict=True), (token_id, logprob)]
        return {self._name(other): finite(value) for other, value in pairs}

    def _ranked(self, token_id: int, logprob: float, ranked: list[int]) -> dict[str, Any]:
        rank = ranked.index(token_id) + 1 if token_id in ranked else None
        text = self._texts.bytes_of(token_id).decode("utf-8", "replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}


def _readable(piece: bytes, prefix: str) -> str:
    r"""Text, or for a part of a character what OpenAI writes: \xf0\x9f."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in piece)


class Offsets:
    """Where each token's text begins in an answer, in code points.

    stream: a fresh detokenizer, as the answer's own. A token that completes no character begins where the
    character will.
    """

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._length = 0

    def push(self, token_ids: Sequence[int]) -> list[int]:
        """The places of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._length)
            self._length += len(self._stream.push([token_id]))
        return offsets
