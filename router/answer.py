"""One answer on its way to the client: its generation, its text, its chunks.

Ends the generation when the text comes to a stop, which only the router can see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton.v1 import common_pb2
from baton.v1.inference_service_pb2 import Choice, Chunk, GenerateResponse, PromptLogprobsChunk
from router.answer_text import AnswerText
from router.decode_link import DecodeLink
from router.generation import Generation
from router.timeline import Timeline
from router.token_stream import PromptTokens, Tokens, TokenStream

Write = Callable[[GenerateResponse], Awaitable[None]]


class Answer:
    """One of the answers to a prompt.

    generation: not yet running; what it brings arrives at stream.
    text: has taken in what the client has already.
    write: sends one message to the client.
    """

    def __init__(
        self, generation: Generation, stream: TokenStream, timeline: Timeline, text: AnswerText, write: Write
    ) -> None:
        self.timeline = timeline
        self._generation = generation
        self._request = generation.request
        self._stream = stream
        self._text = text
        self._write = write
        self._is_ended = False

    @property
    def committed(self) -> asyncio.Future[DecodeLink | None]:
        """Done once its KV is at a decode worker, with that worker, or with None once it ends without."""
        return self._generation.committed

    def choice(self) -> Choice:
        """How it ended."""
        return Choice(
            index=self._request.sample_index,
            finish_reason=self._finish_reason,
            num_output_tokens=self._text.num_tokens,
            matched_stop=self._text.matched_stop,
        )

    async def run(self) -> None:
        """Runs to its last chunk; raises what ends it before. Leaves nothing behind in either case."""
        request = self._request
        name = f"generation-{request.request_id}-{request.sample_index}"
        task = asyncio.create_task(self._generation.run(), name=name)
        try:
            await self._relay()
            if self._text.matched_stop:
                self._generation.stop()
            else:
                await task
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                # Where the client left first, nobody else asks how the generation ended.
                task.exception()
        if not self._is_ended:
            await self._end()

    async def _relay(self) -> None:
        """Passes on what comes, up to the end or a stop."""
        while (arrived := await self._stream.next()) is not None:
            match arrived:
                case PromptTokens():
                    await self._write(GenerateResponse(prompt_logprobs=self._prompt_chunk(arrived)))
                case Tokens():
                    await self._write(GenerateResponse(chunk=self._chunk(arrived)))
            if self._text.matched_stop:
                return

    def _chunk(self, tokens: Tokens) -> Chunk:
        """These tokens and their text; with the rest of the text and the reason, if they are the last."""
        text = self._text.push(tokens.token_ids)
        reason = common_pb2.FINISH_REASON_UNSPECIFIED
        if self._text.matched_stop or (self._generation.finish_reason and not self._stream.has_more):
            self._is_ended = True
            text += self._text.flush()
            reason = self._finish_reason
        count = self._text.num_tokens - tokens.start_index
        return Chunk(
            index=self._request.sample_index,
            start_index=tokens.start_index,
            token_ids=tokens.token_ids[:count],
            text=text,
            logprobs=tokens.logprobs[:count],
            top_logprobs=tokens.top_logprobs[:count],
            finish_reason=reason,
        )

    def _prompt_chunk(self, tokens: PromptTokens) -> PromptLogprobsChunk:
        return PromptLogprobsChunk(
            start_index=tokens.start_index,
            token_ids=self._request.prompt_token_ids[tokens.start_index : tokens.end_index],
            logprobs=tokens.logprobs,
            top_logprobs=tokens.top_logprobs,
        )

    async def _end(self) -> None:
        """A last chunk without tokens, where those that came last were not known to be the last."""
        text = self._text.flush()
        chunk = Chunk(
            index=self._request.sample_index,
            start_index=self._text.num_tokens,
            text=text,
            finish_reason=self._finish_reason,
        )
        await self._write(GenerateResponse(chunk=chunk))

    @property
    def _finish_reason(self) -> common_pb2.FinishReason.ValueType:
        # The text says so last: flushing it can still complete a stop.
        if self._text.matched_stop:
            return common_pb2.FINISH_REASON_STOP
        return self._generation.finish_reason
