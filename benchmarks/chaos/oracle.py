"""What an answer must be: the undisturbed cluster's tokens, and where it never said, transformers'.

Sampling is computed from transformers' logits and the noise that docs/sampling.md defines. Equal answers are
compared once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from baton.errors import InternalError
from benchmarks.chaos.load import Case, Record
from engine.philox import gumbel

# Two scores closer than this may change places between two correct ways to add numbers.
TIE = 1e-4


class Oracle:
    """Knows the right answer to every case. model: of the same weights, in fp32."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._undisturbed: dict[Case, tuple[int, ...]] = {}
        self._known: dict[tuple[Case, tuple[int, ...]], bool] = {}

    def learn(self, records: Sequence[Record]) -> None:
        """Takes the answers of the undisturbed cluster for what all others must be.

        Raises InternalError if one of them is missing, or is not what transformers says.
        """
        for record in records:
            if record.outcome != "answered" or not self.is_right(record):
                length = len(record.case.prompt)
                raise InternalError(f"an undisturbed answer to {length} tokens is wrong: {record.failure}")
            self._undisturbed[record.case] = record.tokens

    def is_right(self, record: Record) -> bool:
        """Whether its tokens are the right ones; of an answer that was ended, as far as they go."""
        case, tokens = record.case, record.tokens
        if record.outcome == "answered" and len(tokens) != case.max_tokens:
            return False
        if not tokens or self._undisturbed.get(case, ())[: len(tokens)] == tokens:
            return True
        key = case, tokens
        if key not in self._known:
            self._known[key] = self._agrees(case, tokens)
        return self._known[key]

    @torch.inference_mode()
    def _agrees(self, case: Case, tokens: tuple[int, ...]) -> bool:
        """One forward pass yields the logits at every place, given the answer's own tokens before it.

        Where transformers itself sees a tie, each of the tied tokens is right, and so is going on from it.
        """
        ids = torch.tensor([[*case.prompt, *tokens[:-1]]])
        scores_PV = self._scores(self._model(ids, logits_to_keep=len(tokens)).logits[0].float(), case)
        found_P = torch.tensor(tokens)
        margin_P = scores_PV.amax(-1) - scores_PV.gather(1, found_P[:, None])[:, 0]
        for place, margin in enumerate(margin_P.tolist()):
            if margin > TIE:
                print(
                    f"after {len(case.prompt)} tokens, token {place} is {tokens[place]}: {margin:.5f} behind"
                )
                return False
        return True

    @staticmethod
    def _scores(logits_PV: torch.Tensor, case: Case) -> torch.Tensor:
        """What the largest of wins at each place: logits, or Gumbel-argmax at a temperature."""
        if case.temperature == 0:
            return logits_PV
        num_places, vocab_size = logits_PV.shape
        token_ids = torch.arange(vocab_size).expand(num_places, -1)
        positions = len(case.prompt) + torch.arange(num_places)[:, None].expand(-1, vocab_size)

        def word(value: int) -> torch.Tensor:
            return torch.full_like(token_ids, value)

        noise_PV = gumbel(
            token_ids,
            seed_low=word(case.seed & 0xFFFFFFFF),
            seed_high=word(case.seed >> 32),
            position=positions,
            sample_index=word(0),
        )
        return logits_PV / case.temperature + noise_PV
