"""What the bodies of requests have in common: the rules of reading them, and the fields of every generation.

Owns types and names only; which values make sense is said once, in baton/sampling.py and router/request.py. A
field that is not here is refused, so that a typo does not pass for a default. Every field may be null, which
is to leave it out.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

NO_EFFECT: Final = "no effect"
REFUSED: Final = "refused"


def _refuse(value: object) -> None:
    if value is not None:
        raise PydanticCustomError("not_served", "not supported")


# What a field holds that is read and changes nothing, and one that has to stay null.
Ignored = Annotated[Any, Field(description=NO_EFFECT)]
Refused = Annotated[Any, AfterValidator(_refuse), Field(description=REFUSED)]

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
# A long list is left at its first fault.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
# Of JSON, whose keys are text.
Object = dict[str, Any]


class Body(BaseModel):
    """What every object in a body is read by."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )


class StreamOptions(Body):
    """What else goes into a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


class JsonSchema(Body):
    """A schema as response_format has it."""

    name: str | None = None
    description: Ignored = None
    schema_: Object | bool | None = Field(None, alias="schema")
    strict: Ignored = None


class ResponseFormat(Body):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's way to say what an answer must be: one of these."""

    json_: Object | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None


class GenerationBody(Body):
    """The fields that completions and chats share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Int32 | None = None
    stop: str | Texts | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    response_format: ResponseFormat | None = None
    max_tokens: Int32 | None = None

    # vLLM's.
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: Int32 | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    guided_json: Object | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: Int32 | None = None
    truncate_prompt_tokens: Int32 | None = None
    return_token_ids: bool | None = None

    # Baton's own.
    priority: Literal["low", "normal", "high"] | None = None
    ttft_objective_ms: float | None = None

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    spaces_between_special_tokens: Ignored = None

    use_beam_search: Annotated[Literal[False] | None, Field(description=REFUSED)] = None
    logits_processors: Refused = None
    bad_words: Refused = None
