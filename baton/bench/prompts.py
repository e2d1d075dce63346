"""Prompts of random token ids, all from one seed; nobody's text is sent."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton.bench.arrivals import poisson_gaps
from baton.bench.lengths import Lengths
from baton.bench.outcome import Planned
from baton.bench.trace_file import TraceEntry

# Of a trace that names the blocks of its prompts, as Mooncake's does.
TRACE_BLOCK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """What is asked. Two with the same settings ask the very same.

    first_id, last_id: token ids are drawn from these, both included.
    shared_prefix: so many first tokens are the same in every prompt, for a prefix cache to find.
    """

    seed: int
    input_lengths: Lengths
    output_lengths: Lengths
    first_id: int
    last_id: int
    shared_prefix: int = 0

    def drawn(self, name: str = "requests") -> Iterator[Planned]:
        """Requests without end, due at once; another name means other prompts of the same kind."""
        sizes, ids = random.Random(f"{self.seed} {name} sizes"), random.Random(f"{self.seed} {name} ids")
        prefix = self._ids(random.Random(f"{self.seed} prefix"), self.shared_prefix)
        while True:
            num_prompt_tokens = self.input_lengths.draw(sizes)
            own = self._ids(ids, max(0, num_prompt_tokens - len(prefix)))
            yield Planned(
                at_s=0.0,
                token_ids=(prefix + own)[:num_prompt_tokens],
                max_tokens=self.output_lengths.draw(sizes),
            )

    def arriving(self, rate: float) -> Iterator[Planned]:
        """The same requests, with arrivals of a Poisson process of `rate` requests/s."""
        at_s = 0.0
        gaps = poisson_gaps(random.Random(f"{self.seed} times"))
        for request, gap in zip(self.drawn(), gaps, strict=False):
            yield Planned(at_s=at_s, token_ids=request.token_ids, max_tokens=request.max_tokens)
            at_s += gap / rate

    def replayed(self, trace: Iterable[TraceEntry], *, speed: float) -> Iterator[Planned]:
        """The requests of a trace, each at its time divided by `speed`, with its own lengths.

        Prompts share the blocks that the trace says they share.
        """
        ids = random.Random(f"{self.seed} ids")
        for entry in trace:
            token_ids: tuple[int, ...] = ()
            for name in entry.hash_ids:
                token_ids += self._ids(random.Random(f"{self.seed} block {name}"), TRACE_BLOCK)
            token_ids += self._ids(ids, max(0, entry.num_prompt_tokens - len(token_ids)))
            yield Planned(
                at_s=entry.at_s / speed,
                token_ids=token_ids[: entry.num_prompt_tokens],
                max_tokens=entry.num_output_tokens,
            )

    def _ids(self, rng: random.Random, count: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(self.first_id, self.last_id + 1), k=count))
