"""Every bad request is refused by the name of its field; every good one is read exactly."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidRequest, UnknownModel
from baton.sampling import Grammar, SamplingParams
from baton.v1 import common_pb2, inference_service_pb2
from router.grammars import GrammarCheck
from router.request import GenerationRequest, PromptRequest, RequestReader
from router.tenancy.tenants import ANONYMOUS, Tenant
from router.text import Text
from tests.router.tiny_text import BOS, MAX_MODEL_LEN, at_once, grammar_check, ids_of, model_dir

GenerateRequest = inference_service_pb2.GenerateRequest
NAN = float("nan")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> RequestReader:
    model = model_dir(tmp_path_factory.mktemp("models") / "tiny")
    return RequestReader(
        model="tiny",
        text=Text(model, at_once),
        grammars=grammar_check(model),
        limits=model.limits,
        eos_token_ids=(2,),
        rng=random.Random(5),
    )


async def read_all(reader: RequestReader, *, tenant: Tenant = ANONYMOUS, **fields: Any) -> PromptRequest:
    request = GenerateRequest.FromString(GenerateRequest(**fields).SerializeToString())
    return await reader.read(
        request,
        tenant=tenant,
        arrived_at=10.0,
        deadline_at=12.0,
        traceparent="00-a-b-01",
        default_max_tokens=16,
    )


async def read(reader: RequestReader, *, tenant: Tenant = ANONYMOUS, **fields: Any) -> GenerationRequest:
    (answer,) = (await read_all(reader, tenant=tenant, **fields)).answers
    return answer


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
    request = replace(request, arrived_at=10.0, deadline_at=12.25)
    sequence = request.sequence([7, 8], now=12.0, traceparent="00-c-d-01")
    assert (list(sequence.token_ids), sequence.num_prompt_tokens) == ([5, 6, 7, 8], 2)
    assert (sequence.remaining_ms, sequence.age_ms, sequence.request_id) == (250, 2000, "x")
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
        ({"chat": {"messages": [{"role": "user", "tool_calls": [{"name": "f"}]}]}}, "chat"),
        ({"chat": {"messages": [{"role": "user"}], "tools": ["{}"]}}, "tools"),
        ({"chat": {"messages": [{"role": "user"}], "template_arguments": "[]"}}, "template_arguments"),
        ({"chat": {"messages": [{"role": "user"}], "template_arguments": '{"x": 1}'}}, "template_arguments"),
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
        ({"text": "a", "allowed_token_ids": [5, 300]}, "allowed_token_ids"),
        ({"text": "a", "logit_bias": {300: 1.0}}, "logit_bias"),
        ({"text": "a", "logit_bias": {5: 101.0}}, "logit_bias"),
        ({"text": "a", "logit_bias": {5: NAN}}, "logit_bias"),
        ({"text": "a", "repetition_penalty": 0.0}, "repetition_penalty"),
        ({"text": "a", "presence_penalty": 2.5}, "presence_penalty"),
        ({"text": "a", "frequency_penalty": -2.5}, "frequency_penalty"),
        ({"text": "a", "min_tokens": -1}, "min_tokens"),
        ({"text": "a", "min_tokens": 4, "max_tokens": 3}, "min_tokens"),
        ({"text": "a", "top_logprobs": 2}, "top_logprobs"),
        ({"text": "a", "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"text": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"text": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"text": "a", "grammar": {}}, "grammar"),
        ({"text": "a", "grammar": {"choices": {"texts": ["a", ""]}}}, "grammar"),
        ({"text": "a", "n": 0}, "n"),
        ({"text": "a", "n": 17}, "n"),
        ({"text": "a", "stop": ["x"] * 17}, "stop"),
        ({"text": "a", "stop": [""]}, "stop"),
        ({"text": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"text": "a", "truncate_prompt_tokens": MAX_MODEL_LEN}, "truncate_prompt_tokens"),
        ({"token_ids": {"ids": []}, "truncate_prompt_tokens": 3}, "prompt"),
        ({"text": "a", "ttft_objective_ms": 0.0}, "ttft_objective_ms"),
        ({"text": "a", "ttft_objective_ms": -1.0}, "ttft_objective_ms"),
        ({"text": "a", "ttft_objective_ms": NAN}, "ttft_objective_ms"),
        ({"text": "a", "ttft_objective_ms": float("inf")}, "ttft_objective_ms"),
        ({"text": "a", "priority": 4}, "priority"),
        ({"text": "a", "priority": -1}, "priority"),
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
        grammars=GrammarCheck(None, at_once),
        limits=model.limits,
        eos_token_ids=(2,),
        rng=random.Random(5),
    )
    with pytest.raises(InvalidRequest) as error:
        await read(plain, text="")
    assert error.value.field == "prompt"
    assert "empty" in error.value.message


async def test_every_parameter_is_read(reader: RequestReader) -> None:
    given: dict[str, Any] = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": 0.75, "frequency_penalty": -0.75, "logit_bias": {7: 2.0, 5: -1.0},
        "allowed_token_ids": [5, 7], "min_tokens": 2, "max_tokens": 3, "stop_token_ids": [9],
        "ignore_eos": True, "logprobs": True, "top_logprobs": 4, "prompt_logprobs": 0, "seed": 6,
        "grammar": {"regex": "a+"},
    }  # fmt: skip
    request = await read(reader, text="a", **given)
    assert request.params == SamplingParams(
        **given
        | {
            "logit_bias": ((5, -1.0), (7, 2.0)),
            "allowed_token_ids": (5, 7),
            "stop_token_ids": (9,),
            "grammar": Grammar(kind="regex", source="a+"),
        }
    )


async def test_every_answer_has_a_request_of_its_own(reader: RequestReader) -> None:
    request = await read_all(reader, text="a", n=3, prompt_logprobs=1, seed=4)
    first, *others = request.answers
    assert first.params.prompt_logprobs == 1
    assert [other.params.prompt_logprobs for other in others] == [None, None]
    sequences = [answer.sequence([], now=5.0, traceparent="") for answer in request.answers]
    assert [sequence.sample_index for sequence in sequences] == [0, 1, 2]
    assert {sequence.sampling.seed for sequence in sequences} == {4}
    assert len({answer.request_id for answer in request.answers}) == 1


async def test_tenants_have_a_name_a_weight_and_a_salt_of_their_own(reader: RequestReader) -> None:
    tenants = [ANONYMOUS, Tenant(name="anna", weight=2.5), Tenant(name="bert")]
    requests = [await read(reader, text="a", tenant=tenant) for tenant in tenants]
    salts = [request.sequence([], now=0.0, traceparent="").cache_salt for request in requests]
    assert salts[0] == b""
    assert len(set(salts)) == 3
    assert [(request.tenant, request.weight) for request in requests] == [("", 1), ("anna", 2.5), ("bert", 1)]


async def test_an_objective_and_a_priority_are_read_for_every_answer(reader: RequestReader) -> None:
    high = common_pb2.PRIORITY_HIGH
    request = await read_all(reader, text="a", n=2, ttft_objective_ms=0.25, priority=high)
    assert [(answer.ttft_objective_ms, answer.priority) for answer in request.answers] == [(0.25, high)] * 2


async def test_without_an_objective_there_is_none_and_the_priority_is_normal(reader: RequestReader) -> None:
    request = await read(reader, text="a")
    assert (request.ttft_objective_ms, request.priority) == (None, common_pb2.PRIORITY_NORMAL)


async def test_a_priority_above_the_tenants_is_refused(reader: RequestReader) -> None:
    with pytest.raises(InvalidRequest, match="'high' is above what tenant 'anna' may use, 'normal'") as error:
        await read(reader, text="a", tenant=Tenant(name="anna"), priority=common_pb2.PRIORITY_HIGH)
    assert error.value.field == "priority"


async def test_what_a_request_says_about_text(reader: RequestReader) -> None:
    plain = (await read_all(reader, text="a")).text
    assert (plain.stops, plain.include_stop, plain.skip_special_tokens) == (None, False, True)
    text = (
        await read_all(reader, text="a", stop=["x"], include_stop_in_text=True, skip_special_tokens=False)
    ).text
    assert text.stops is not None
    assert (text.include_stop, text.skip_special_tokens) == (True, False)


async def test_a_chat_with_tools_reaches_the_template_and_keeps_its_markers(tmp_path: Path) -> None:
    template = (
        "{{ messages[-1].role }}{{ tools[0].function.name }}{{ x }}{{ messages[0].tool_calls | length }}"
    )
    model = model_dir(tmp_path / "tools", template=template, with_bos=False)
    reader = RequestReader(
        model="tiny",
        text=Text(model, at_once),
        grammars=grammar_check(model),
        limits=model.limits,
        eos_token_ids=(2,),
        rng=random.Random(5),
    )
    chat = {
        "messages": [
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]},
            {"role": "tool", "content": "3"},
        ],
        "tools": ['{"type": "function", "function": {"name": "f"}}'],
        "template_arguments": '{"x": 7}',
    }
    request = await read_all(reader, chat=chat)
    assert request.first.prompt_token_ids == ids_of("toolf71")
    assert request.text.keep_tool_markers


@pytest.mark.parametrize(
    ("prompt", "keep", "expected"),
    [
        ({"text": "hello"}, 3, ids_of("llo")),
        ({"text": "hello"}, 6, [BOS, *ids_of("hello")]),
        ({"text": "hello"}, 60, [BOS, *ids_of("hello")]),
        ({"token_ids": {"ids": [*range(5, 205)]}}, 2, [203, 204]),
        ({"chat": {"messages": [{"role": "user", "content": "hi"}]}}, 2, ids_of("i;")),
        ({"text": "x" * 200}, MAX_MODEL_LEN - 1, ids_of("x") * (MAX_MODEL_LEN - 1)),
    ],
    ids=["text", "exactly", "longer", "ids", "chat", "too-long-without"],
)
async def test_a_truncated_prompt_keeps_its_last_tokens(
    reader: RequestReader, prompt: dict[str, Any], keep: int, expected: list[int]
) -> None:
    request = await read(reader, **prompt, truncate_prompt_tokens=keep)
    assert request.prompt_token_ids == expected


async def test_an_answer_goes_on_after_the_tokens_that_the_client_has(reader: RequestReader) -> None:
    prompt = {"ids": [5, 6]}
    known = [{"token_ids": [7, 8], "num_chars": 3}]
    request = await read(reader, token_ids=prompt, max_tokens=9, seed=4, partial_answers=known)
    assert request.num_delivered_chars == 3
    sequence = request.sequence(request.output_token_ids, now=0.0, traceparent="")
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
    known = [{"index": 1, "token_ids": output}]
    request = await read_all(reader, token_ids={"ids": [5]}, seed=4, n=2, partial_answers=known, **options)
    assert [answer.finish_reason for answer in request.answers] == [0, reason]


async def test_the_client_may_know_better_why_an_answer_ended(reader: RequestReader) -> None:
    stop = common_pb2.FINISH_REASON_STOP
    known = [{"token_ids": [7], "finish_reason": stop}]
    request = await read(reader, token_ids={"ids": [5]}, seed=4, partial_answers=known)
    assert request.finish_reason == stop


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"partial_answers": [{"token_ids": [7, 8, 9]}], "max_tokens": 2, "seed": 1}, "partial_answers"),
        ({"partial_answers": [{"token_ids": [10**6]}], "max_tokens": 9, "seed": 1}, "partial_answers"),
        ({"partial_answers": [{"index": 1}], "seed": 1}, "partial_answers"),
        ({"partial_answers": [{}, {}], "seed": 1}, "partial_answers"),
        ({"partial_answers": [{"token_ids": [7]}], "max_tokens": 9}, "seed"),
    ],
    ids=["too-many", "outside", "no-such-answer", "twice", "no-seed"],
)
async def test_what_cannot_go_on_is_refused(
    reader: RequestReader, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        await read(reader, token_ids={"ids": [5]}, **fields)
    assert error.value.field == field


async def test_an_unsound_grammar_is_refused_with_the_place(reader: RequestReader) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "strange"}}}'
    with pytest.raises(InvalidRequest, match="#/properties/a") as error:
        await read(reader, text="a", grammar={"json_schema": schema})
    assert error.value.field == "grammar"


async def test_a_model_without_grammars_says_so(tmp_path: Path) -> None:
    model = model_dir(tmp_path / "tiny")
    with pytest.raises(InvalidRequest, match="cannot be used with a grammar"):
        await GrammarCheck(None, at_once).completes(Grammar(kind="regex", source="a"), [[]])
    (model.path / "tokenizer.json").write_text("{}")
    check = await GrammarCheck.of(model, at_once)
    with pytest.raises(InvalidRequest, match=r"with a grammar: tokenizer\.json cannot be used") as error:
        await check.completes(Grammar(kind="regex", source="a"), [[]])
    # Where it lies is nobody's business.
    assert str(tmp_path) not in error.value.message


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("", 0), ("ye", 0), ("yes", common_pb2.FINISH_REASON_STOP)],
    ids=["nothing", "a part", "all"],
)
async def test_an_answer_that_its_grammar_has_completed_is_not_asked_for_again(
    reader: RequestReader, answer: str, reason: int
) -> None:
    known = [{"token_ids": ids_of(answer), "num_chars": len(answer)}]
    grammar = {"choices": {"texts": ["yes", "no"]}}
    request = await read(reader, text="a", seed=1, grammar=grammar, partial_answers=known)
    assert request.finish_reason == reason
