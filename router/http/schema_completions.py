"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import Field

from router.http.schema import REFUSED, GenerationBody, Int32, Refused, TokenIds

MAX_PROMPTS: Final = 64
_Several = Field(fail_fast=True, max_length=MAX_PROMPTS)
Prompts = str | TokenIds | Annotated[list[str], _Several] | Annotated[list[TokenIds], _Several]


class CompletionBody(GenerationBody):
    """One prompt, or several: text, or token ids."""

    prompt: Prompts | None = None
    logprobs: Int32 | None = None

    best_of: Annotated[Literal[1] | None, Field(description=REFUSED)] = None
    echo: Annotated[Literal[False] | None, Field(description=REFUSED)] = None
    suffix: Annotated[Literal[""] | None, Field(description=REFUSED)] = None
    prompt_embeds: Refused = None

    def prompts(self) -> Sequence[str | list[int]]:
        """Each of them by itself."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [prompt for prompt in self.prompt or () if not isinstance(prompt, int)]
        ids = [token_id for token_id in self.prompt or () if isinstance(token_id, int)]
        return several or ([ids] if self.prompt is not None else [])
