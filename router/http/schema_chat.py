"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from router.conversation import MAX_CALLS, MAX_MESSAGES
from router.http.schema import REFUSED, Body, GenerationBody, Ignored, Int32, Object, Refused
from router.tools import MAX_TOOLS

MAX_PARTS: Final = 1_000


class ContentPart(Body):
    """A part of what somebody said. Parts that are no text are named so that they can be refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    audio_url: Any = None
    file: Any = None


class FunctionCall(Body):
    """A function that the assistant called. arguments: a JSON object, as text."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call in the assistant's turn."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall
    index: Ignored = None


class Message(Body):
    """One turn."""

    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None

    name: Ignored = None
    refusal: Ignored = None
    annotations: Ignored = None
    reasoning: Ignored = None
    reasoning_content: Ignored = None
    audio: Refused = None
    function_call: Refused = None


class Function(Body):
    """What a tool is. parameters: a JSON schema."""

    name: str
    description: str | None = None
    parameters: Object | None = None
    strict: Ignored = None


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of one."""

    name: str


class ToolChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]
Modalities = Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=1)]


class ChatBody(GenerationBody):
    """A conversation."""

    messages: Messages | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Object | None = None

    modalities: Annotated[Modalities | None, Field(description=REFUSED)] = None
    reasoning_effort: Ignored = None
    verbosity: Ignored = None
    include_reasoning: Ignored = None

    add_generation_prompt: Annotated[Literal[True] | None, Field(description=REFUSED)] = None
    continue_final_message: Annotated[Literal[False] | None, Field(description=REFUSED)] = None
    add_special_tokens: Annotated[Literal[False] | None, Field(description=REFUSED)] = None
    echo: Annotated[Literal[False] | None, Field(description=REFUSED)] = None
    chat_template: Refused = None
    documents: Refused = None
    audio: Refused = None
    functions: Refused = None
    function_call: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None
