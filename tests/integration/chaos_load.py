"""The load of the chaos test: clients that ask one question after the other, and a record of each.

It knows the SDK and the addresses of the routers, and nothing of faults.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton import AsyncClient
from baton.errors import BatonError
from baton.routers import Routers

# Enough that some go on while others wait at a link or a process that is silent.
NUM_CLIENTS = 10
# Of a whole answer; longer than the longest fault by far.
DEADLINE_S = 60.0
CONNECT_S = 15.0
# As many answers as prove that the cluster works, and how long they may take.
NUM_ANSWERS = 3
ANSWERS_WITHIN_S = 30.0

Case = tuple[tuple[int, ...], int]


def mixed_cases() -> list[Case]:
    """Prompts from one token to many chunks, with answers from short to several seconds long."""
    rng = random.Random(1)
    sizes = [(n, m) for n in (1, 16, 90, 300, 700, 1400) for m in (8, 60, 400)]
    return [(tuple(rng.randrange(3, 259) for _ in range(n)), m) for n, m in sizes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One question: when it was asked and ended, on the loop's clock, and what came of it.

    was_retried: its router made a further attempt.
    was_moved: the client went on at another router, or at the same one when it was back.
    failure: what the client saw instead of an answer.
    """

    case: Case
    asked_at: float
    ended_at: float
    tokens: tuple[int, ...] = ()
    was_retried: bool = False
    was_moved: bool = False
    failure: BatonError | None = None

    @property
    def was_resumed(self) -> bool:
        return self.was_retried or self.was_moved


class CountedRouters(Routers):
    """The routers of one client, and how often it has turned away from one."""

    num_lost = 0

    def lose(self, stub_target: str) -> None:
        self.num_lost += 1
        super().lose(stub_target)


@dataclass
class Load:
    """Clients that ask until stopped.

    addresses: of all routers; each question begins at one drawn for it, so that all of them have work.
    has_new_prompts: no prompt begins like another, so that no worker has cached any.
    """

    addresses: Sequence[str]
    seed: int
    has_new_prompts: bool = False
    records: list[Record] = field(default_factory=list)
    is_stopped: bool = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(NUM_CLIENTS):
                group.create_task(self._ask_on(random.Random(self.seed * NUM_CLIENTS + index)))

    async def progress(self) -> None:
        """Waits until some answers have come from now."""
        due = self._num_answers() + NUM_ANSWERS
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            while self._num_answers() < due:
                await asyncio.sleep(0.02)

    def _num_answers(self) -> int:
        return sum(record.failure is None for record in self.records)

    async def _ask_on(self, rng: random.Random) -> None:
        cases = mixed_cases()
        while not self.is_stopped:
            targets = rng.sample(self.addresses, len(self.addresses))
            prompt, max_tokens = rng.choice(cases)
            if self.has_new_prompts:
                prompt = (*(rng.randrange(3, 259) for _ in range(4)), *prompt)
            self.records.append(await ask(targets, (prompt, max_tokens)))


async def ask(targets: Sequence[str], case: Case) -> Record:
    """Asks one question with a client of its own, which begins at the first target."""
    clock = asyncio.get_running_loop().time
    asked_at = clock()
    try:
        routers = await CountedRouters.connect(targets, CONNECT_S)
        num_lost = routers.num_lost
        async with AsyncClient(routers) as client:
            tokens, num_attempts = await answer(client, case)
    except BatonError as error:
        return Record(case=case, asked_at=asked_at, ended_at=clock(), failure=error)
    return Record(
        case=case,
        asked_at=asked_at,
        ended_at=clock(),
        tokens=tokens,
        was_retried=num_attempts > 1,
        was_moved=routers.num_lost > num_lost,
    )


async def answer(client: AsyncClient, case: Case) -> tuple[tuple[int, ...], int]:
    """The tokens of one greedy answer, and the attempts that its last router made.

    Their indices must have no gap and no repetition.
    """
    prompt, max_tokens = case
    generation = client.generate(
        token_ids=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, timeout_s=DEADLINE_S
    )
    tokens: list[int] = []
    async for chunk in generation:
        assert chunk.start_index == len(tokens)
        tokens += chunk.token_ids
    assert generation.summary.num_output_tokens == len(tokens) == max_tokens
    return tuple(tokens), generation.summary.timings.num_attempts
