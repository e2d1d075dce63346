"""What the bodies of requests have in common: the rules of reading them, and the fields of every generation.

Owns types and names only; which values make sense is said once, in baton/sampling.py and router/request.py. A
field that is not here is refused, so that a typo does not pass for a default. Every field may be null, which
is to leave it out.

Every list has a bound and is left at its first fault, an object at the first field that is not known: what is
wrong with a body costs no more than what is right with it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from baton.sampling import MAX_CHOICES, MAX_LOGIT_BIAS
from router.stops import MAX_STOPS

NO_EFFECT: Final = "no effect"
REFUSED: Final = "refused"
# As many as the longest body holds, but for ids of one or two digits.
MAX_TOKEN_IDS: Final = 4_000_000
# Types of errors here that are about one name in the object; their context has it.
UNKNOWN_FIELD: Final = "unknown_field"
NO_TOKEN_ID: Final = "no_token_id"
TOO_LONG: Final = "too_long"


def _refuse(value: object) -> None:
    if value is not None:
        raise PydanticCustomError("not_served", "not supported")


# What a field holds that is read and changes nothing, and one that has to stay null.
Ignored = Annotated[Any, Field(description=NO_EFFECT)]
Refused = Annotated[Any, AfterValidator(_refuse), Field(description=REFUSED)]

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKEN_IDS)]
Choices = Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICES)]
Stops = Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)]
# Of JSON, whose keys are text; nothing in it is looked at here.
Object = dict[str, Any]


def _few(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError(TOO_LONG, "too many", {"max_length": MAX_LOGIT_BIAS})
    return value


def _by_id(biases: dict[str, float]) -> dict[int, float]:
    for name in biases:
        if not (name.isascii() and name.isdecimal() and len(name) <= 10 and int(name) < 2**32):
            raise PydanticCustomError(NO_TOKEN_ID, "no token id", {"name": name})
    return {int(name): bias for name, bias in biases.items()}


LogitBias = Annotated[dict[str, float], BeforeValidator(_few), AfterValidator(_by_id)]


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
    names: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Notes the names as bodies have them."""
        super().__pydantic_init_subclass__(**kwargs)
        cls.names = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, value: Any) -> Any:
        """Refuses the first name that is not known; pydantic would collect them all."""
        if isinstance(value, dict) and not value.keys() <= cls.names:
            unknown = next(name for name in value if name not in cls.names)
            raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {"name": unknown})
        return value


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
    choice: Choices | None = None
    grammar: str | None = None


class GenerationBody(Body):
    """The fields that completions and chats share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Int32 | None = None
    stop: str | Stops | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    response_format: ResponseFormat | None = None
    max_tokens: Int32 | None = None

    # vLLM's.
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: Int32 | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    guided_json: Object | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: Int32 | None = None
    truncate_prompt_tokens: Int32 | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None

    # Baton's own.
    # 0 is vLLM's word for the normal one.
    priority: Literal["low", "normal", "high"] | Annotated[int, Field(ge=0, le=0)] | None = None
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
