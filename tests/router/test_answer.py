"""One answer on its way: what its chunks hold, and what ends with it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.errors import Unavailable
from baton.v1 import common_pb2
from baton.v1.inference_service_pb2 import GenerateResponse
from router.answer import Answer
from router.answer_text import AnswerText, TextOptions
from router.stops import StopAutomaton
from router.text_stream import TextStream
from router.token_stream import TokenStream
from router.token_texts import TokenTexts
from tests.fakes import GUARD_S, until
from tests.router.tiny_text import byte_tokenizer, ids_of


class PlayedGeneration:
    """A generation that a test ends."""

    def __init__(self, stream: TokenStream) -> None:
        self.request = SimpleNamespace(request_id="r", sample_index=2, prompt_token_ids=[5, 6, 7, 8])
        self.finish_reason = common_pb2.FINISH_REASON_UNSPECIFIED
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.runs = False
        self.was_cancelled = False
        self.was_stopped = False
        self._stream = stream

    def stop(self) -> None:
        self.was_stopped = True

    async def run(self) -> None:
        self.runs = True
        try:
            await self.outcome
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        finally:
            self._stream.end()


class Played:
    def __init__(self, *stops: str) -> None:
        self.stream = TokenStream()
        self.generation: Any = PlayedGeneration(self.stream)
        self.sent: list[GenerateResponse] = []
        options = TextOptions(stops=StopAutomaton(stops) if stops else None)
        text = AnswerText(TextStream(TokenTexts(byte_tokenizer())), options)
        timeline: Any = None
        self.answer = Answer(self.generation, self.stream, timeline, text, self.write)
        self.task = asyncio.create_task(self.answer.run())

    async def write(self, response: GenerateResponse) -> None:
        self.sent.append(response)

    async def running(self) -> None:
        await until(lambda: bool(self.generation.runs))

    async def end(self) -> None:
        async with asyncio.timeout(GUARD_S):
            await self.task


def top(token_id: int) -> common_pb2.TopLogprobs:
    return common_pb2.TopLogprobs(token_ids=[token_id], logprobs=[-0.5])


async def test_chunks_hold_tokens_with_their_logprobs_and_the_last_one_the_reason() -> None:
    played = Played()
    ids = ids_of("ab")
    played.stream.push(ids, [-0.5, -1.5], [top(1), top(2)])
    await until(lambda: len(played.sent) == 1)
    chunk = played.sent[0].chunk
    assert (chunk.index, chunk.start_index, list(chunk.token_ids), chunk.text) == (2, 0, ids, "ab")
    assert (list(chunk.logprobs), list(chunk.top_logprobs)) == ([-0.5, -1.5], [top(1), top(2)])
    played.generation.finish_reason = common_pb2.FINISH_REASON_LENGTH
    played.generation.outcome.set_result(None)
    await played.end()
    last = played.sent[1].chunk
    assert (last.start_index, list(last.token_ids), last.text) == (2, [], "")
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    choice = played.answer.choice()
    assert (choice.index, choice.num_output_tokens, choice.matched_stop) == (2, 2, "")


async def test_tokens_after_a_stop_are_cut_with_all_that_belongs_to_them() -> None:
    played = Played("b")
    await played.running()
    ids = ids_of("abc")
    played.stream.push(ids, [-0.5, -1.5, -2.5], [top(1), top(2), top(3)])
    await played.end()
    (chunk,) = (response.chunk for response in played.sent)
    assert (list(chunk.token_ids), chunk.text, list(chunk.logprobs)) == (ids[:2], "a", [-0.5, -1.5])
    assert list(chunk.top_logprobs) == [top(1), top(2)]
    assert chunk.finish_reason == common_pb2.FINISH_REASON_STOP
    assert played.generation.was_cancelled
    choice = played.answer.choice()
    assert (choice.finish_reason, choice.num_output_tokens) == (common_pb2.FINISH_REASON_STOP, 2)
    assert choice.matched_stop == "b"


async def test_a_stop_in_the_last_token_counts_as_a_stop() -> None:
    played = Played("b")
    played.generation.finish_reason = common_pb2.FINISH_REASON_LENGTH
    played.stream.push(ids_of("ab"), [])
    played.generation.outcome.set_result(None)
    await played.end()
    assert played.answer.choice().finish_reason == common_pb2.FINISH_REASON_STOP


async def test_tokens_known_to_be_the_last_carry_the_reason_and_the_rest_of_the_text() -> None:
    # What could still become the stop is held back until no more comes.
    played = Played("bc")
    played.generation.finish_reason = common_pb2.FINISH_REASON_LENGTH
    played.stream.push(ids_of("ab"), [])
    played.generation.outcome.set_result(None)
    await played.end()
    (chunk,) = (response.chunk for response in played.sent)
    assert (list(chunk.token_ids), chunk.text) == (ids_of("ab"), "ab")
    assert chunk.finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_the_prompts_logprobs_come_with_its_tokens() -> None:
    played = Played()
    event = common_pb2.PromptLogprobs(start_index=2, logprobs=[-1.5, -2.5], top_logprobs=[top(1), top(2)])
    played.stream.push_prompt_logprobs(common_pb2.PromptLogprobs(start_index=1, logprobs=[-0.5]))
    await until(lambda: len(played.sent) == 1)
    played.stream.push_prompt_logprobs(event)
    played.generation.outcome.set_result(None)
    await played.end()
    first, second = (response.prompt_logprobs for response in played.sent[:2])
    assert (first.start_index, list(first.token_ids), list(first.logprobs)) == (1, [6], [-0.5])
    assert (second.start_index, list(second.token_ids)) == (2, [7, 8])
    assert list(second.top_logprobs) == [top(1), top(2)]


async def test_a_generation_that_fails_has_no_last_chunk() -> None:
    played = Played()
    played.stream.push(ids_of("a"), [])
    await until(lambda: len(played.sent) == 1)
    played.generation.outcome.set_exception(Unavailable("lost"))
    with pytest.raises(Unavailable, match="lost"):
        await played.end()
    assert len(played.sent) == 1


async def test_a_client_that_takes_nothing_more_ends_the_generation() -> None:
    played = Played()

    async def refuse(response: GenerateResponse) -> None:
        raise Unavailable("the client has read nothing")

    played.answer._write = refuse
    await played.running()
    played.stream.push(ids_of("a"), [])
    with pytest.raises(Unavailable, match="read nothing"):
        await played.end()
    assert played.generation.was_cancelled
