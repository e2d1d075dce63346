"""The load of a chaos run: clients that ask one question after the other, and a record of each.

It knows the SDK and the addresses of the routers, and nothing of faults.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton import AsyncClient
from baton.answer import Summary
from baton.errors import BatonError, Cancelled, DeadlineExceeded
from baton.failure import from_failure, to_failure
from baton.generation import Generation
from baton.routers import Routers

# Of a whole answer; longer than the longest fault by far.
DEADLINE_S = 90.0
CONNECT_S = 15.0
# No long answer comes within this.
TOO_SOON_S = 0.1
# Until a client that cancels by the clock does so; most are at their prompt then.
CANCEL_WITHIN_S = 0.3
# As many answers as prove that the cluster works, and how long they may take.
NUM_ANSWERS = 3
ANSWERS_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is asked: token ids, and how the answer is drawn. temperature 0 is greedy."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A case as one client asks it: cancelled after some seconds or tokens, or due too soon to be met."""

    case: Case
    cancel_after_s: float | None = None
    cancel_after_tokens: int | None = None
    is_too_soon: bool = False

    @property
    def is_cancelled(self) -> bool:
        """Whether the client does not mean to hear it out."""
        return self.cancel_after_s is not None or self.cancel_after_tokens is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One question: when it was asked and ended, on the loop's clock, and what came of it.

    arrivals: when each piece of the answer came.
    outcome: "answered", "cancelled" (as the client wanted), "expired" (as it had to be), or "failed".
    was_retried: its router made a further attempt.
    was_moved: the client went on at another router, or at the same one when it was back.
    places: the routers and the workers that it is known to have been at.
    failure: what the client saw instead of an answer.
    """

    case: Case
    asked_at: float
    ended_at: float
    outcome: str = "answered"
    tokens: tuple[int, ...] = ()
    arrivals: tuple[float, ...] = ()
    was_retried: bool = False
    was_moved: bool = False
    places: frozenset[str] = frozenset()
    failure: BatonError | None = None

    @property
    def was_resumed(self) -> bool:
        """Whether anything but the first try had a part in it."""
        return self.was_retried or self.was_moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What the clients ask.

    cases: drawn from, each as often as another.
    token_ids: what new prompts begin with is drawn from here.
    new_share: of the greedy questions, those that begin like no other, so that no worker has cached any of
        the prompt. cancel_share, too_soon_share: of all questions.
    """

    cases: Sequence[Case]
    token_ids: range
    num_clients: int
    new_share: float = 0.5
    cancel_share: float = 0.1
    too_soon_share: float = 0.05

    def draw(self, rng: random.Random) -> Question:
        """The next question of a client."""
        case = rng.choice(self.cases)
        if case.temperature == 0 and rng.random() < self.new_share:
            start = tuple(rng.choice(self.token_ids) for _ in range(4))
            case = replace(case, prompt=(*start, *case.prompt))
        chance = rng.random()
        if chance < self.cancel_share:
            if rng.random() < 0.5:
                return Question(case=case, cancel_after_s=rng.uniform(0, CANCEL_WITHIN_S))
            return Question(case=case, cancel_after_tokens=rng.randrange(1, case.max_tokens))
        if chance < self.cancel_share + self.too_soon_share:
            longest = max(case.max_tokens for case in self.cases)
            return Question(case=replace(case, max_tokens=longest), is_too_soon=True)
        return Question(case=case)


class CountedRouters(Routers):
    """The routers of one client, and the addresses of those that it has turned away from.

    tell: is told of each at once; what comes before it is set is not.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.turned: list[str] = []
        self.tell: Callable[[str], None] | None = None

    def lose(self, stub_target: str) -> None:
        """Turns away, and tells."""
        self.turned.append(stub_target)
        if self.tell is not None:
            self.tell(stub_target)
        super().lose(stub_target)


@dataclass
class Load:
    """Clients that ask until stopped.

    routers: names of all routers by address; each question begins at one drawn for it, so that all have work.
    turned: when a client turned away from a router, and from which.
    """

    routers: Mapping[str, str]
    mix: Mix
    seed: int
    records: list[Record] = field(default_factory=list)
    turned: list[tuple[float, str]] = field(default_factory=list)
    is_stopped: bool = False

    async def run(self) -> None:
        """Asks until is_stopped, and to the end of what is under way then."""
        async with asyncio.TaskGroup() as group:
            for index in range(self.mix.num_clients):
                rng = random.Random(self.seed * self.mix.num_clients + index)
                group.create_task(self._ask_on(rng), name=f"client {index}")

    def turned_at(self, router: str, since: float) -> float | None:
        """When a client first turned away from a router after this moment on the loop's clock."""
        return min((at for at, name in self.turned if name == router and at > since), default=None)

    async def progress(self) -> None:
        """Waits until some answers have come from now."""
        due = self.num_answers + NUM_ANSWERS
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            while self.num_answers < due:
                await asyncio.sleep(0.02)

    @property
    def num_answers(self) -> int:
        """Whole answers so far."""
        return sum(record.outcome == "answered" for record in self.records)

    async def ask(self, question: Question, targets: Sequence[str]) -> Record:
        """Asks one question with a client of its own, which begins at the first target."""
        clock = asyncio.get_running_loop().time
        asked = _Asked(question, clock())
        try:
            routers = await CountedRouters.connect(targets, CONNECT_S)
            # An answer that has not begun cannot move.
            routers.turned.clear()
            routers.tell = self._note_turn
            began_at = self.routers[routers.target]
            async with AsyncClient(routers) as client:
                try:
                    await asked.listen(client)
                finally:
                    turned = {self.routers[target] for target in routers.turned}
                    asked.places |= {began_at, self.routers[routers.target], *turned}
                    asked.was_moved = bool(turned)
        except BatonError as error:
            return asked.record(clock(), error)
        return asked.record(clock())

    def _note_turn(self, target: str) -> None:
        self.turned.append((asyncio.get_running_loop().time(), self.routers[target]))

    async def _ask_on(self, rng: random.Random) -> None:
        addresses = list(self.routers)
        while not self.is_stopped:
            targets = rng.sample(addresses, len(addresses))
            self.records.append(await self.ask(self.mix.draw(rng), targets))


class _Asked:
    """One question while it is under way."""

    def __init__(self, question: Question, asked_at: float) -> None:
        self.places: set[str] = set()
        self.was_moved = False
        self._question = question
        self._asked_at = asked_at
        self._tokens: list[int] = []
        self._arrivals: list[float] = []
        self._summary: Summary | None = None

    async def listen(self, client: AsyncClient) -> None:
        """Hears the answer to its end. Raises whatever ends it before."""
        case, loop = self._question.case, asyncio.get_running_loop()
        generation = client.generate(
            token_ids=case.prompt,
            max_tokens=case.max_tokens,
            temperature=case.temperature,
            seed=case.seed,
            ignore_eos=True,
            timeout_s=TOO_SOON_S if self._question.is_too_soon else DEADLINE_S,
        )
        if self._question.cancel_after_s is not None:
            loop.call_later(self._question.cancel_after_s, generation.cancel)
        await self._collect(generation)

    async def _collect(self, generation: Generation) -> None:
        clock = asyncio.get_running_loop().time
        async for chunk in generation:
            if chunk.token_ids:
                self._tokens += chunk.token_ids
                self._arrivals.append(clock())
            if self._question.cancel_after_tokens in range(1, len(self._tokens) + 1):
                generation.cancel()
        self._summary = generation.summary
        attempts = generation.summary.explain.attempts
        chosen = [place for attempt in attempts for place in attempt.candidates if place.chosen]
        self.places |= {name for place in chosen for name in (place.prefill_worker, place.decode_worker)}

    def record(self, ended_at: float, failure: BatonError | None = None) -> Record:
        """What came of it."""
        return Record(
            case=self._question.case,
            asked_at=self._asked_at,
            ended_at=ended_at,
            outcome=self._outcome(failure),
            tokens=tuple(self._tokens),
            arrivals=tuple(self._arrivals),
            was_retried=self._summary is not None and self._summary.timings.num_attempts > 1,
            was_moved=self.was_moved,
            places=frozenset(self.places),
            # A copy: the error itself would keep the client's connection open through its traceback.
            failure=None if failure is None else from_failure(to_failure(failure)),
        )

    def _outcome(self, failure: BatonError | None) -> str:
        match failure:
            case None:
                return "answered"
            case Cancelled() if self._question.is_cancelled:
                return "cancelled"
            case DeadlineExceeded() if self._question.is_too_soon:
                return "expired"
            case _:
                return "failed"
