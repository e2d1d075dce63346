"""The router behind the documents' examples: it knows their prompts, and what they say comes back."""

from __future__ import annotations

import string
from typing import Any

from baton.errors import InvalidRequest
from baton.v1 import common_pb2
from baton.v1.inference_service_pb2 import Choice, Chunk, Started, Summary, Timings
from tests.baton.scripted_router import Response, Scripted

# One list of pieces per answer.
ANSWERS: dict[str, list[list[str]]] = {
    "The capital of France is": [[" Paris", "."]],
    "The first letters are": [[f" {letter}," for letter in string.ascii_uppercase]],
    "A word for it is": [[" baton"], [" relay"]],
    "What is the capital of France?": [["Paris", "."]],
    "And of Peru?": [["Lima", "."]],
    "The largest city of Peru, as JSON: ": [['{"name": "Lima",', ' "population": 10092000}']],
    "Is it raining in Lima?": [["No."]],
}


async def answer(server: Scripted, context: Any) -> None:
    """Answers the newest request."""
    request = server.requests[-1]
    if request.top_p > 1:
        raise InvalidRequest(f"top_p is {request.top_p}; it must be above 0 and at most 1", field="top_p")
    users = [message.content for message in request.chat.messages if message.role == "user"]
    # The tokens are those of the first prompt.
    asked = next(iter(ANSWERS)) if request.HasField("token_ids") else request.text or users[-1]
    answers = ANSWERS[asked][: request.n or 1]
    started = Started(request_id=request.request_id or "req-1", seed=7, num_prompt_tokens=len(asked.split()))
    await context.write(Response(started=started))
    for index, pieces in enumerate(answers):
        for start, piece in enumerate(pieces):
            part = Chunk(index=index, start_index=start, token_ids=[start], text=piece)
            if request.logprobs:
                part.logprobs.append(-0.125)
            await context.write(Response(chunk=part))
    choices = [
        Choice(index=index, finish_reason=common_pb2.FINISH_REASON_STOP, num_output_tokens=len(pieces))
        for index, pieces in enumerate(answers)
    ]
    summary = Summary(
        request_id=started.request_id,
        model="tiny",
        choices=choices,
        num_prompt_tokens=started.num_prompt_tokens,
        num_output_tokens=sum(choice.num_output_tokens for choice in choices),
        seed=started.seed,
        timings=Timings(ttft_ms=41.0, num_attempts=1),
    )
    await context.write(Response(summary=summary))
