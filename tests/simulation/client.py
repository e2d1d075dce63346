"""Clients: each sends one request with the real SDK, reads its answer, and may lose patience.

Owns the client's view of the laws: one outcome per request, indices that rise by one,
tokens that are a prefix of the undisturbed answer, text that is theirs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from baton.answer import Chunk, Summary
from baton.api_keys import ApiKey
from baton.errors import BatonError
from baton.generation import Generation
from baton.routers import Routers
from baton.telemetry import Span
from baton.v1 import common_pb2
from baton.v1.inference_service_pb2 import GenerateRequest, GenerateResponse, TokenIds
from tests.fakes import expected_answer
from tests.simulation.calls import Caller, ClientCall, Metadata
from tests.simulation.plan import KV_SHAPE, RequestPlan

# A reader that is slow has little room in front of it.
SLOW_WINDOW_BYTES = 24


class SimRouters(Routers):
    """The SDK's routers over the simulated network; also the stub it makes its calls with.

    resumed: called when an answer goes on at another router.
    """

    def __init__(
        self,
        targets: list[str],
        caller: Caller,
        window_bytes: int | None,
        resumed: Callable[[], None],
        api_key: ApiKey | None = None,
    ) -> None:
        super().__init__(targets, api_key=api_key)
        self._caller = caller
        self._window_bytes = window_bytes
        self._resumed = resumed

    @property
    def stub(self) -> Any:
        return self

    def Generate(  # noqa: N802 - gRPC name
        self, request: GenerateRequest, *, timeout: float | None, metadata: Metadata
    ) -> ClientCall:
        """One call on the current router."""
        if request.partial_answers:
            self._resumed()
        call = self._caller.open(
            "generate",
            self.target,
            GenerateResponse.FromString,
            metadata=metadata,
            remaining_s=timeout,
        )
        if self._window_bytes is not None:
            call.limit_window(self._window_bytes)
        call.send(request)
        return call


class Client:
    """One request from its first byte to its one outcome.

    outcome: "" while it runs; then "finished", "cancelled", or an error's code. reason: the error's words.
    note: called with what happens. tokenizer: of the model. rng: the SDK's. rope_steps: the model's.
    """

    def __init__(
        self,
        plan: RequestPlan,
        routers: SimRouters,
        tokenizer: Tokenizer,
        rng: random.Random,
        note: Callable[[str], None],
        *,
        rope_steps: tuple[int, ...] = (),
    ) -> None:
        self.plan = plan
        self.outcome = ""
        self.reason = ""
        self.token_ids: list[int] = []
        self.expected = expected_answer(
            plan.prompt,
            plan.max_tokens,
            KV_SHAPE,
            seed=plan.seed,
            stop_token_ids=plan.stop_token_ids,
            rope_steps=rope_steps,
        )
        self._routers = routers
        self._tokenizer = tokenizer
        self._rng = rng
        self._note = note
        self._text = ""

    async def run(self) -> None:
        """Sends the request at its time and follows it to its end."""
        await asyncio.sleep(self.plan.at - asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(self.plan.cancel_after_s):
                outcome = await self._ask()
        except TimeoutError:
            outcome = "cancelled"
        self._end(outcome)

    async def _ask(self) -> str:
        request = self._request()
        try:
            async with Generation(
                self._routers, request, Span(None, ""), self.plan.deadline_s, self._rng
            ) as generation:
                async for chunk in generation:
                    self._take(chunk)
                    if self.plan.patience_s:
                        await asyncio.sleep(self.plan.patience_s)
        except BatonError as error:
            self.reason = error.message
            return error.code
        self._check_finished(generation.summary)
        return "finished"

    def _request(self) -> GenerateRequest:
        plan = self.plan
        return GenerateRequest(
            token_ids=TokenIds(ids=plan.prompt),
            max_tokens=plan.max_tokens,
            # The tattle-tale's draws are keyed by the seed, as the sampler's are.
            temperature=1.0,
            seed=plan.seed,
            stop_token_ids=plan.stop_token_ids,
            request_id=plan.request_id,
            ignore_eos=True,
            priority=common_pb2.Priority.ValueType(plan.priority),
            ttft_objective_ms=plan.ttft_objective_ms,
        )

    def _take(self, chunk: Chunk) -> None:
        name = self.plan.request_id
        if self.outcome:
            raise AssertionError(f"{name}: tokens after the end")
        if chunk.start_index != len(self.token_ids):
            raise AssertionError(
                f"{name}: token {chunk.start_index} came where {len(self.token_ids)} was due"
            )
        self.token_ids += chunk.token_ids
        self._text += chunk.text
        if self.token_ids != self.expected[: len(self.token_ids)]:
            raise AssertionError(f"{name}: wrong tokens {self.token_ids}, expected {self.expected}")

    def _end(self, outcome: str) -> None:
        if self.outcome:
            raise AssertionError(f"{self.plan.request_id} ended twice")
        self.outcome = outcome
        self._note(f"{self.plan.request_id} {outcome} after {len(self.token_ids)} tokens")

    def _check_finished(self, summary: Summary) -> None:
        name = self.plan.request_id
        if self.token_ids != self.expected or summary.num_output_tokens != len(self.expected):
            raise AssertionError(f"{name}: finished with {self.token_ids}, expected {self.expected}")
        reason = "stop" if self.expected[-1] in self.plan.stop_token_ids else "length"
        if summary.finish_reason != reason:
            raise AssertionError(f"{name}: finish reason {summary.finish_reason}, expected {reason}")
        text = self._tokenizer.decode(self.expected)
        if self._text != text:
            raise AssertionError(f"{name}: text {self._text!r}, expected {text!r}")
