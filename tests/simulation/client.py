"""Clients: each sends one request, reads its answer, and may lose patience.

Owns the client's view of the laws: one outcome per request, indices that rise by one,
tokens that are a prefix of the undisturbed answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from baton.rpc import translate
from baton.v1 import common_pb2
from baton.v1.inference_service_pb2 import Chunk, GenerateRequest, GenerateResponse, Summary, TokenIds
from tests.simulation.calls import Caller, ClientCall
from tests.simulation.nodes import KV_SHAPE
from tests.simulation.plan import RequestPlan
from tests.simulation.tattletale import answer

# A reader that is slow has little room in front of it.
SLOW_WINDOW_BYTES = 24


class Client:
    """One request from its first byte to its one outcome.

    outcome: "" while it runs; then "finished", "cancelled", or an error's code.
    note: called with what happens.
    """

    def __init__(self, plan: RequestPlan, caller: Caller, note: Callable[[str], None]) -> None:
        self.plan = plan
        self.outcome = ""
        self.token_ids: list[int] = []
        self.expected = answer(plan.prompt, plan.max_tokens, plan.seed, plan.stop_token_ids, KV_SHAPE)
        self._caller = caller
        self._note = note
        self._summary: Summary | None = None

    async def run(self) -> None:
        """Sends the request at its time and follows it to its end."""
        await asyncio.sleep(self.plan.at - asyncio.get_running_loop().time())
        plan = self.plan
        patience = [limit for limit in (plan.deadline_s, plan.cancel_after_s) if limit is not None]
        try:
            async with asyncio.timeout(min(patience, default=None)):
                outcome = await self._ask()
        except TimeoutError:
            is_cancel = plan.cancel_after_s is not None and plan.cancel_after_s == min(patience)
            outcome = "cancelled" if is_cancel else "DEADLINE_EXCEEDED"
        self._end(outcome)

    async def _ask(self) -> str:
        plan = self.plan
        call = self._caller.open(
            "generate", plan.router, GenerateResponse.FromString, remaining_s=plan.deadline_s
        )
        if plan.patience_s:
            call.limit_window(SLOW_WINDOW_BYTES)
        try:
            await call.write(
                GenerateRequest(
                    token_ids=TokenIds(ids=plan.prompt),
                    max_tokens=plan.max_tokens,
                    temperature=0.0,
                    seed=plan.seed,
                    stop_token_ids=plan.stop_token_ids,
                    request_id=plan.request_id,
                )
            )
            return await self._read(call)
        except asyncio.InvalidStateError:
            return "UNAVAILABLE"
        except grpc.aio.AioRpcError as error:
            return translate(error).code
        finally:
            call.cancel()

    async def _read(self, call: ClientCall) -> str:
        async for response in call:
            if response.HasField("summary"):
                self._summary = response.summary
            else:
                self._take(response.chunk)
            if self.plan.patience_s:
                await asyncio.sleep(self.plan.patience_s)
        return "finished"

    def _take(self, chunk: Chunk) -> None:
        name = self.plan.request_id
        if self._summary is not None or self.outcome:
            raise AssertionError(f"{name}: tokens after the end")
        if chunk.start_index != len(self.token_ids):
            raise AssertionError(
                f"{name}: token {chunk.start_index} came where {len(self.token_ids)} was due"
            )
        self.token_ids += chunk.token_ids
        if self.token_ids != self.expected[: len(self.token_ids)]:
            raise AssertionError(f"{name}: wrong tokens {self.token_ids}, expected {self.expected}")

    def _end(self, outcome: str) -> None:
        if self.outcome:
            raise AssertionError(f"{self.plan.request_id} ended twice")
        self.outcome = outcome
        self._note(f"{self.plan.request_id} {outcome} after {len(self.token_ids)} tokens")
        if outcome == "finished":
            self._check_finished()

    def _check_finished(self) -> None:
        name, summary = self.plan.request_id, self._summary
        if summary is None:
            raise AssertionError(f"{name}: finished without a summary")
        if self.token_ids != self.expected or summary.num_output_tokens != len(self.expected):
            raise AssertionError(f"{name}: finished with {self.token_ids}, expected {self.expected}")
        stopped = self.expected[-1] in self.plan.stop_token_ids
        reason = common_pb2.FINISH_REASON_STOP if stopped else common_pb2.FINISH_REASON_LENGTH
        if summary.finish_reason != reason:
            raise AssertionError(f"{name}: finish reason {summary.finish_reason}, expected {reason}")
