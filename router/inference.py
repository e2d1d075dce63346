"""Answers requests, whatever the door they came through: reads one, runs its generations, streams the answer.

A door (router/service.py for gRPC, router/http for HTTP) turns a call of its protocol into a Call and this
module's messages and errors into its own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from baton.errors import BatonError, Overloaded, Unavailable
from baton.models import ModelDir
from baton.prefix_keys import rope_salt
from baton.telemetry import ROOT_SPAN, Span, start_span
from baton.v1 import common_pb2, inference_service_pb2
from baton.v1.inference_service_pb2 import GenerateRequest, GenerateResponse
from baton.v1.route_explain_pb2 import RouteExplain
from router.answer import Answer, Write
from router.answer_text import AnswerText
from router.core import RouterCore
from router.decode_link import DecodeLink
from router.fanout import Fanout
from router.generation import Generation
from router.grammars import GrammarCheck
from router.handover import Handover
from router.placing.prompt_keys import PromptKeys
from router.request import GenerationRequest, PromptRequest, RequestReader
from router.tenancy.rate_limits import RateLimits
from router.tenancy.tenants import Metadata, Tenant, Tenants
from router.text import Text
from router.timeline import Timeline
from router.token_stream import TokenStream

ResultT = TypeVar("ResultT")


class Call(Protocol):
    """A request's way back to whoever asked.

    metadata: what the call says beside the request; tenants.Tenants reads the API key there.
    traceparent: W3C header of the caller's span, or "".
    remaining_s: time until the caller's deadline, in seconds; None without one.
    default_max_tokens: of a request that names none, where the router's settings do not say.
    """

    metadata: Metadata
    traceparent: str
    remaining_s: float | None
    default_max_tokens: int

    async def write(self, response: GenerateResponse) -> None:
        """Sends one message; waits while the reader is behind."""


class Inference:
    """Serves one model.

    Every answer is one Generation; `num_requests` counts the requests in flight, one for all the
    answers to a prompt.

    core: what serves them.  tenants, limits: whose requests are taken, and how many; by default all are.
    handover: ends the answers that still run as the router leaves.
    """

    def __init__(
        self,
        *,
        core: RouterCore,
        model: ModelDir,
        text: Text,
        grammars: GrammarCheck,
        rng: random.Random,
        tenants: Tenants | None = None,
        limits: RateLimits | None = None,
    ) -> None:
        self.num_requests = 0
        self.handover = Handover()
        config = core.config
        self._core = core
        self._config = config
        self._model = model
        self._tenants = tenants or Tenants({})
        self._limits = limits or RateLimits((), 0)
        self._rng = rng
        self._text = text
        self._reader = RequestReader(
            model=model.name,
            text=text,
            limits=model.limits,
            eos_token_ids=model.eos_token_ids,
            rng=rng,
            grammars=grammars,
        )

    async def generate(self, request: GenerateRequest, call: Call) -> None:
        """Streams the answers to one request; cancelling it ends them. Raises BatonError."""
        arrived_at = asyncio.get_running_loop().time()
        span = start_span(ROOT_SPAN, parent=call.traceparent)
        self.num_requests += 1
        try:
            async with self.handover.covering():
                await self._generate(request, call, span, arrived_at)
        except BatonError as error:
            span.fail(error)
            raise
        finally:
            self.num_requests -= 1
            span.end()

    async def _generate(self, request: GenerateRequest, call: Call, span: Span, arrived_at: float) -> None:
        self._check_room()
        tenant = self._tenants.of(call.metadata)
        # Before the prompt is read and a grammar compiled, which is work.
        self._charge(tenant, arrived_at, 0, num_requests=1)
        remaining_s = call.remaining_s
        validated = await self._reader.read(
            request,
            tenant=tenant,
            arrived_at=arrived_at,
            deadline_at=None if remaining_s is None else arrived_at + remaining_s,
            traceparent=span.traceparent,
            default_max_tokens=self._config.default_max_tokens or call.default_max_tokens,
        )
        span.set(**{"baton.request_id": validated.first.request_id})
        self._charge(tenant, arrived_at, len(validated.first.prompt_token_ids), num_requests=0)
        await self._answer(validated, tenant, span, call)

    def _check_room(self) -> None:
        """Raises Overloaded if too many requests are in flight, this one among them."""
        if self.num_requests > self._config.max_requests:
            self._core.outlook.metrics.shed("requests")
            raise Overloaded(
                f"{self._config.max_requests} requests are in flight already; try again later",
                retry_after_s=1.0,
            )

    def _charge(self, tenant: Tenant, now: float, num_prompt_tokens: int, *, num_requests: int) -> None:
        """Counts a request against its tenant's rates; raises Overloaded above them."""
        try:
            self._limits.take(tenant, now, num_prompt_tokens, num_requests=num_requests)
        except Overloaded:
            self._core.outlook.metrics.shed("rate")
            raise

    def check_key(self, metadata: Metadata) -> None:
        """Raises Unauthenticated like generate(), for a door that has something to do before it."""
        self._tenants.of(metadata)

    def models(self, metadata: Metadata) -> list[inference_service_pb2.Model]:
        """The one model served; raises Unauthenticated like generate()."""
        self._tenants.of(metadata)
        model = inference_service_pb2.Model(
            name=self._model.name,
            max_model_len=self._model.max_model_len,
            weights_id=self._model.weights_id,
        )
        return [model]

    async def _answer(self, request: PromptRequest, tenant: Tenant, span: Span, call: Call) -> None:
        # The answers share one stream to the client, which takes one message at a time.
        turn = asyncio.Lock()

        async def write(response: GenerateResponse) -> None:
            async with turn:
                await self._write(call, response)

        first = request.first
        started = inference_service_pb2.Started(
            request_id=first.request_id,
            seed=first.params.seed,
            num_prompt_tokens=len(first.prompt_token_ids),
        )
        await write(GenerateResponse(started=started))
        answers: list[Answer] = []
        timelines = self._core.explanations.begin(first.request_id)

        def make(index: int, beside: DecodeLink | None) -> Answer:
            answers.append(self._one(request, index, beside, span, write))
            timelines.append(answers[-1].timeline)
            return answers[-1]

        try:
            await Fanout(len(request.answers), make).run()
        finally:
            self._core.explanations.end(first.request_id, timelines)
            num_generated = sum(answer.timeline.num_tokens for answer in answers)
            self._limits.charge(tenant, asyncio.get_running_loop().time(), num_generated)
        await write(GenerateResponse(summary=self._summary(first, answers)))

    def _one(
        self, prompt: PromptRequest, index: int, beside: DecodeLink | None, span: Span, write: Write
    ) -> Answer:
        """One of the answers, ready to run."""
        request, text = self._replayed(prompt, index)
        stream = TokenStream(len(request.output_token_ids))
        timeline = self._timeline(request)
        generation = Generation(
            request,
            config=self._config,
            dispatcher=self._core.dispatcher,
            fleet=self._core.fleet,
            outlook=self._core.outlook,
            limits=self._model.limits,
            stream=stream,
            timeline=timeline,
            span=span,
            rng=self._rng,
            beside=beside,
        )
        return Answer(generation, stream, timeline, text, write)

    def _timeline(self, request: GenerationRequest) -> Timeline:
        explain = RouteExplain(
            request_id=request.request_id,
            sample_index=request.sample_index,
            router=self._config.name,
            tenant=request.tenant,
            priority=request.priority,
            num_prompt_tokens=len(request.prompt_token_ids),
            ttft_objective_ms=request.objective_ms(self._config),
        )
        log, number = (self._core.log, self._logged(request)) if self._core.log.is_on else (None, 0)
        return Timeline(request.arrived_at, explain, log, number, is_leaving=lambda: self.handover.has_begun)

    def _logged(self, request: GenerationRequest) -> int:
        """The request's number in the log of decisions."""
        rope_step = self._model.limits.rope_step(len(request.prompt_token_ids))
        keys = PromptKeys(request.prompt_token_ids, rope_salt(request.cache_salt, rope_step))
        sizes = {link.block_size for link in self._core.fleet.links if link.is_ready}
        return self._core.log.request(
            request.arrived_at,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.params.max_tokens,
            sample_index=request.sample_index,
            tenant=request.tenant,
            priority=request.priority,
            weight=request.weight,
            ttft_objective_ms=request.objective_ms(self._config),
            prefix={size: keys.all(size) for size in sizes},
        )

    def _replayed(self, prompt: PromptRequest, index: int) -> tuple[GenerationRequest, AnswerText]:
        """The request for one answer, and its text up to where the client has it."""
        request, options = prompt.answers[index], prompt.text
        text = AnswerText(
            self._text.stream(
                skip_special_tokens=options.skip_special_tokens, keep_tool_markers=options.keep_tool_markers
            ),
            options,
            min_tokens=request.params.min_tokens,
            num_delivered_chars=request.num_delivered_chars,
        )
        text.replay(request.output_token_ids)
        if text.matched_stop:
            request = replace(request, finish_reason=common_pb2.FINISH_REASON_STOP)
        return request, text

    async def _write(self, call: Call, response: GenerateResponse) -> None:
        await within(
            self._config.write_timeout_s,
            lambda: call.write(response),
            f"the client reads too slowly: its buffer has been full for {self._config.write_timeout_s:g} s",
        )

    def _summary(
        self, request: GenerationRequest, answers: Sequence[Answer]
    ) -> inference_service_pb2.Summary:
        choices = [answer.choice() for answer in answers]
        timings = answers[0].timeline.timings()
        timings.total_ms = max(answer.timeline.timings().total_ms for answer in answers)
        num_prompt_tokens = len(request.prompt_token_ids)
        return inference_service_pb2.Summary(
            request_id=request.request_id,
            model=self._model.name,
            choices=choices,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=sum(choice.num_output_tokens for choice in choices),
            seed=request.params.seed,
            timings=timings,
            num_cached_tokens=min(num_prompt_tokens, answers[0].timeline.num_cached_tokens),
            explain=answers[0].timeline.report(),
        )


async def within(timeout_s: float, act: Callable[[], Awaitable[ResultT]], message: str) -> ResultT:
    """Awaits act() for at most timeout_s seconds; raises Unavailable(message) after that."""
    try:
        async with asyncio.timeout(timeout_s):
            return await act()
    except TimeoutError:
        raise Unavailable(message) from None
