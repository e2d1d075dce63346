"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from router.http.schema import REFUSED, Body, Object, TokenIds
from router.http.schema_chat import Messages, Tools


class TokenizeBody(Body):
    """A prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: Object | None = None
    return_token_strs: bool | None = None

    add_special_tokens: Annotated[bool | None, Field(description=REFUSED)] = None
    add_generation_prompt: Annotated[Literal[True] | None, Field(description=REFUSED)] = None
    continue_final_message: Annotated[Literal[False] | None, Field(description=REFUSED)] = None


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: TokenIds | None = None
