"""Which tokens a request has, and how often its answer has each: what penalties need.

Owns one growing pair of arrays per request. It follows the tokens by catching up with them, so
that a resumed request, which begins with all its tokens, needs no case of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.batch import Float32Array, Int64Array

_LEAST_CAPACITY = 64


class TokenCounts:
    """Distinct tokens in order of appearance, and their counts in the answer.

    with_prompt: whether tokens that only the prompt has are listed, with count 0.
    """

    def __init__(self, num_prompt_tokens: int, *, with_prompt: bool) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0 if with_prompt else num_prompt_tokens
        self._places: dict[int, int] = {}
        self._token_ids = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.float32)

    def catch_up(self, token_ids: Sequence[int]) -> tuple[Int64Array, Float32Array]:
        """Counts what is new in the request's tokens; returns all ids and counts, [E] each.

        The arrays are views: they hold until the next call.
        """
        if self._num_counted < self._num_prompt_tokens:
            self._list_prompt(token_ids[: self._num_prompt_tokens])
        for token_id in token_ids[self._num_counted :]:
            place = self._places.setdefault(token_id, len(self._places))
            self._reserve(place + 1)
            self._token_ids[place] = token_id
            self._counts[place] += 1
        self._num_counted = len(token_ids)
        size = len(self._places)
        return self._token_ids[:size], self._counts[:size]

    def _list_prompt(self, prompt: Sequence[int]) -> None:
        distinct = dict.fromkeys(prompt)
        self._places = {token_id: place for place, token_id in enumerate(distinct)}
        self._reserve(len(distinct))
        self._token_ids[: len(distinct)] = list(distinct)
        self._num_counted = self._num_prompt_tokens

    def _reserve(self, size: int) -> None:
        capacity = len(self._token_ids)
        if size > capacity:
            more = max(size, 2 * capacity, _LEAST_CAPACITY) - capacity
            self._token_ids = np.concatenate([self._token_ids, np.zeros(more, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])
