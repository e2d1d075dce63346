"""Every bad request is refused by the name of its field; every good one is read exactly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidRequest, UnknownModel
from baton.v1 import common_pb2, inference_service_pb2
from router.request import GenerationRequest, RequestReader
from router.text import Text
from tests.router.tiny_text import BOS, MAX_MODEL_LEN, at_once, ids_of, model_dir

GenerateRequest = inference_service_pb2.GenerateRequest
NAN = float("nan")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> RequestReader:
    model = model_dir(tmp_path_factory.mktemp("models") / "tiny")
    return RequestReader(
        model="tiny",
        text=Text(model, at_once),
        limits=model.limits,
        eos_token_ids=(2,),
        default_max_tokens=16,
        rng=random.Random(5),
    )


async def read(reader: RequestReader, **fields: Any) -> GenerationRequest:
    data = GenerateRequest(**fields).SerializeToString()
    return await reader.read(
        GenerateRequest.FromString(data), arrived_at=10.0, deadline_at=12.0, traceparent="00-a-b-01"
    )


async def test_a_text_prompt_is_tokenized_with_its_bos(reader: RequestReader) -> None:
    request = await read(reader, text="héllo", max_tokens=3, temperature=0.5, seed=9, request_id="r1")
    assert request.prompt_token_ids == [BOS, *ids_of("héllo")]
    assert (request.params.max_tokens, request.params.temperature, request.params.seed) == (3, 0.5, 9)
    assert (request.request_id, request.arrived_at, request.deadline_at) == ("r1", 10.0, 12.0)
    assert request.traceparent == "00-a-b-01"


async def test_a_chat_has_exactly_the_bos_of_its_template(reader: RequestReader) -> None:
    request = await read(reader, chat={"messages": [{"role": "user", "content": "hi"}]})
    assert request.prompt_token_ids == [BOS, *ids_of("user:hi;")]


async def test_token_ids_are_taken_as_they_are(reader: RequestReader) -> None:
    assert (await read(reader, token_ids={"ids": [5, 299, 0]})).prompt_token_ids == [5, 299, 0]


async def test_what_is_not_said_is_resolved_here(reader: RequestReader) -> None:
    first, second = await read(reader, text="a"), await read(reader, text="a")
    assert (first.params.temperature, first.params.top_k, first.params.top_p) == (1.0, 0, 1.0)
    assert (first.params.min_p, first.params.max_tokens) == (0.0, 16)
    assert first.params.seed != second.params.seed
    assert first.request_id != second.request_id
    assert first.request_id.startswith("req-")


async def test_the_default_answer_ends_where_the_context_does(reader: RequestReader) -> None:
    request = await read(reader, token_ids={"ids": [5] * (MAX_MODEL_LEN - 3)})
    assert request.params.max_tokens == 3


async def test_zero_is_a_value_not_an_absence(reader: RequestReader) -> None:
    request = await read(reader, text="a", temperature=0.0, seed=0, top_k=0)
    assert (request.params.temperature, request.params.seed) == (0.0, 0)


async def test_workers_see_prompt_and_output(reader: RequestReader) -> None:
    request = await read(reader, token_ids={"ids": [5, 6]}, max_tokens=9, request_id="x")
    sequence = request.sequence([7, 8], 250, "00-c-d-01")
    assert (list(sequence.token_ids), sequence.num_prompt_tokens) == ([5, 6, 7, 8], 2)
    assert (sequence.remaining_ms, sequence.request_id) == (250, "x")
    assert (sequence.sampling.max_tokens, sequence.traceparent) == (9, "00-c-d-01")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"text": "a", "token_ids": {"ids": [5]}}, "prompt"),
        ({"text": "a", "chat": {"messages": [{"role": "user", "content": "a"}]}}, "prompt"),
        ({"token_ids": {"ids": []}}, "prompt"),
        ({"chat": {"messages": []}}, "chat"),
        ({"chat": {"messages": [{"role": "judge", "content": "a"}]}}, "chat"),
        ({"chat": {"messages": [{"role": "user", "content": ""}] * 1001}}, "chat"),
        ({"text": "a", "temperature": -0.5}, "temperature"),
        ({"text": "a", "temperature": NAN}, "temperature"),
        ({"text": "a", "top_p": 0.0}, "top_p"),
        ({"text": "a", "top_p": NAN}, "top_p"),
        ({"text": "a", "top_k": -1}, "top_k"),
        ({"text": "a", "min_p": 1.5}, "min_p"),
        ({"text": "a", "max_tokens": 0}, "max_tokens"),
        ({"text": "a", "max_tokens": -7}, "max_tokens"),
        ({"text": "a", "max_tokens": MAX_MODEL_LEN}, "max_tokens"),
        ({"token_ids": {"ids": [300]}}, "token_ids"),
        ({"token_ids": {"ids": [2**32 - 1]}}, "token_ids"),
        ({"token_ids": {"ids": [5] * MAX_MODEL_LEN}}, "prompt"),
        ({"token_ids": {"ids": [5] * 1_000_000}}, "prompt"),
        ({"text": "a" * MAX_MODEL_LEN}, "prompt"),
        ({"text": "a", "stop_token_ids": [300]}, "stop_token_ids"),
        ({"text": "a", "stop_token_ids": list(range(65))}, "stop_token_ids"),
        ({"text": "a", "request_id": "x" * 129}, "request_id"),
        ({"text": "a", "request_id": "x\n{}"}, "request_id"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "nothing",
)
async def test_a_bad_request_is_refused_by_field(
    reader: RequestReader, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        await read(reader, **fields)
    assert error.value.field == field


async def test_an_unknown_model_is_named_beside_the_one_that_is_served(reader: RequestReader) -> None:
    with pytest.raises(UnknownModel, match="'other' is not served here; this cluster serves 'tiny'") as error:
        await read(reader, text="a", model="other")
    assert error.value.field == "model"
    assert (await read(reader, text="a", model="tiny")).prompt_token_ids == [BOS, *ids_of("a")]


async def test_a_text_far_too_long_is_refused_without_being_tokenized(
    reader: RequestReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader._text, "_tokenizer", None)
    with pytest.raises(InvalidRequest, match="at most 64 tokens") as error:
        await read(reader, text="a" * (64 * 64 + 1))
    assert error.value.field == "prompt"


async def test_an_empty_text_is_its_bos_or_refused(reader: RequestReader, tmp_path: Path) -> None:
    assert (await read(reader, text="")).prompt_token_ids == [BOS]
    model = model_dir(tmp_path / "plain", with_bos=False)
    plain = RequestReader(
        model="plain",
        text=Text(model, at_once),
        limits=model.limits,
        eos_token_ids=(2,),
        default_max_tokens=16,
        rng=random.Random(5),
    )
    with pytest.raises(InvalidRequest) as error:
        await read(plain, text="")
    assert error.value.field == "prompt"
    assert "empty" in error.value.message


async def test_an_answer_goes_on_after_the_tokens_that_the_client_has(reader: RequestReader) -> None:
    prompt = {"ids": [5, 6]}
    request = await read(reader, token_ids=prompt, max_tokens=9, seed=4, output_token_ids=[7, 8])
    sequence = request.sequence(request.output_token_ids, 0, "")
    assert (list(sequence.token_ids), sequence.num_prompt_tokens) == ([5, 6, 7, 8], 2)
    assert request.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED


@pytest.mark.parametrize(
    ("output", "options", "reason"),
    [
        ([7, 8], {"max_tokens": 2}, common_pb2.FINISH_REASON_LENGTH),
        ([7, 2], {"max_tokens": 9}, common_pb2.FINISH_REASON_STOP),
        ([7, 2], {"max_tokens": 9, "ignore_eos": True}, common_pb2.FINISH_REASON_UNSPECIFIED),
        ([7, 8], {"max_tokens": 9, "stop_token_ids": [8]}, common_pb2.FINISH_REASON_STOP),
    ],
    ids=["all-tokens", "eos", "eos-ignored", "stop-id"],
)
async def test_an_answer_that_is_complete_already_is_not_continued(
    reader: RequestReader, output: list[int], options: dict[str, Any], reason: int
) -> None:
    request = await read(reader, token_ids={"ids": [5]}, seed=4, output_token_ids=output, **options)
    assert request.finish_reason == reason


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"output_token_ids": [7, 8, 9], "max_tokens": 2, "seed": 1}, "output_token_ids"),
        ({"output_token_ids": [10**6], "max_tokens": 9, "seed": 1}, "output_token_ids"),
        ({"output_token_ids": [7], "max_tokens": 9}, "seed"),
    ],
    ids=["too-many", "outside", "no-seed"],
)
async def test_what_cannot_go_on_is_refused(
    reader: RequestReader, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        await read(reader, token_ids={"ids": [5]}, **fields)
    assert error.value.field == field
