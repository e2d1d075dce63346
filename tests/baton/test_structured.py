"""Answers as values of a class: pydantic models, classes of one's own, and answers that break off."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError, field_validator

from baton import AsyncClient, Client
from baton.errors import IncompleteAnswer, InvalidRequest
from baton.structured import grammar_of
from baton.v1 import common_pb2, inference_service_pb2
from tests.baton.scripted_router import Answer, Response, Scripted, background, serving

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


class Street(BaseModel):
    name: str
    number: int = Field(ge=1)


class Person(BaseModel):
    """With what a schema can say: nesting, lists, choices, defaults, references to itself."""

    name: str
    home: Street | None = None
    streets: list[Street] = []
    friends: dict[str, Person] = {}

    @field_validator("name")
    @classmethod
    def _has_no_digit(cls, name: str) -> str:
        if any(char.isdigit() for char in name):
            raise ValueError("a name has no digits")
        return name


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class Number(RootModel[int]):
    pass


class Own:
    """Not pydantic's."""

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object"}

    @classmethod
    def model_validate_json(cls, json_data: str, /) -> Own:
        return cls(json_data)


def saying(text: str, reason: common_pb2.FinishReason.ValueType = STOP, matched_stop: str = "") -> Answer:
    async def answer(server: Scripted, context: Any) -> None:
        half = len(text) // 2
        for start, part in ((0, text[:half]), (1, text[half:])):
            chunk = inference_service_pb2.Chunk(start_index=start, token_ids=[7], text=part)
            await context.write(Response(chunk=chunk))
        choice = inference_service_pb2.Choice(finish_reason=reason, matched_stop=matched_stop)
        await context.write(Response(summary=inference_service_pb2.Summary(choices=[choice])))

    return answer


async def parsed(answer: Answer, cls: Any = Person, **options: Any) -> Any:
    async with serving(answer) as (_, server), await AsyncClient.connect(server.address) as client:
        return await client.parse(cls, "Someone, as JSON: ", **options)


ADA = {"name": "Ada", "home": {"name": "Elm", "number": 3}, "friends": {"x": {"name": "Bo"}}}


async def test_an_answer_becomes_an_instance() -> None:
    async with (
        serving(saying(json.dumps(ADA))) as (scripted, server),
        await AsyncClient.connect(server.address) as client,
    ):
        person = await client.parse(Person, messages=[{"role": "user", "content": "Who?"}], max_tokens=64)
        (request,) = scripted.requests
    assert person == Person(name="Ada", home=Street(name="Elm", number=3), friends={"x": Person(name="Bo")})
    assert (request.chat.messages[0].content, request.max_tokens) == ("Who?", 64)
    assert request.grammar.WhichOneof("kind") == "json_schema"


def test_the_synchronous_client_does_the_same() -> None:
    with background(saying('{"name": "Ada"}')) as (_, address), Client.connect(address) as client:
        assert client.parse(Person, "Someone: ") == Person(name="Ada")


async def test_any_class_with_the_two_methods_will_do() -> None:
    assert (await parsed(saying('{"a": 1}'), Own)).text == '{"a": 1}'


@pytest.mark.parametrize(
    ("cls", "value", "is_taken"),
    [
        (Person, ADA, True),
        (Person, {}, False),
        (Person, ADA | {"age": 3}, False),
        (Person, ADA | {"home": {"name": "Elm", "number": 3, "zip": 5}}, False),
        (Person, ADA | {"streets": [{"name": "Elm", "number": 0}]}, False),
        (Person, ADA | {"streets": [{"name": "Elm", "number": 1, "zip": 5}]}, False),
        (Person, ADA | {"friends": {"x": {"name": "Bo", "age": 3}}}, False),
        (Open, {"name": "Ada", "age": 3}, True),
        (Number, 5, True),
    ],
)
def test_the_grammar_says_what_the_class_says_and_closes_objects(
    cls: Any, value: Any, is_taken: bool
) -> None:
    schema = json.loads(grammar_of(cls).source)
    assert jsonschema.Draft202012Validator(schema).is_valid(value) == is_taken


@pytest.mark.parametrize(
    ("text", "reason", "matched_stop", "field"),
    [
        ('{"name": "Ad', LENGTH, "", "max_tokens"),
        ("", LENGTH, "", "max_tokens"),
        ('{"name":', STOP, "A", "stop"),
        ('{"name":', STOP, "", "stop_token_ids"),
    ],
)
async def test_an_answer_that_broke_off_is_a_typed_error_with_its_text(
    text: str, reason: Any, matched_stop: str, field: str
) -> None:
    with pytest.raises(IncompleteAnswer, match="before its JSON was complete") as error:
        await parsed(saying(text, reason, matched_stop))
    assert (error.value.field, error.value.text, error.value.retryable) == (field, text, False)
    assert not text or text not in error.value.message


async def test_an_answer_that_was_just_complete_is_whole() -> None:
    assert await parsed(saying('{"name": "Ada"}', LENGTH)) == Person(name="Ada")
    # More digits might have come.
    with pytest.raises(IncompleteAnswer):
        await parsed(saying("12", LENGTH), Number)
    assert await parsed(saying("12"), Number) == Number(12)


async def test_what_no_schema_says_the_class_refuses_itself() -> None:
    with pytest.raises(ValidationError, match="a name has no digits"):
        await parsed(saying('{"name": "R2D2"}'))


@pytest.mark.parametrize(
    ("cls", "options", "field"),
    [
        (int, {}, "grammar"),
        ({"type": "object"}, {}, "grammar"),
        (Person, {"grammar": grammar_of(Street)}, "grammar"),
        (Person, {"n": 2}, "n"),
    ],
)
async def test_what_gives_no_single_value_is_refused(cls: Any, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        await parsed(saying("{}"), cls, **options)
    assert error.value.field == field
