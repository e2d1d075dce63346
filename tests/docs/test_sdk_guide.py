"""docs/sdk.md does what it shows, and names what there is: options, arguments, variables and errors."""

from __future__ import annotations

import inspect
import re

import pytest

from baton import AsyncClient, BatonError, Retry, connection, errors
from baton.generate_request import build_request
from baton.rpc import MAX_MESSAGE_BYTES
from baton.v1.inference_service_pb2 import GenerateRequest
from tests.docs.snippets import ROOT, Snippet, blocks, is_printed

GUIDE = ROOT / "docs" / "sdk.md"
TEXT = GUIDE.read_text(encoding="utf-8")
PROGRAMS = [*blocks(GUIDE), *blocks(ROOT / "README.md")]


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.place for program in PROGRAMS])
def test_a_program_runs_and_prints_what_it_should(program: Snippet, addresses: dict[str, str]) -> None:
    printed = program.run(addresses)
    assert program.printed is None or is_printed(printed, program.printed), printed


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_every_option_is_named_and_can_be_sent() -> None:
    named = {name for row in rows("Options of a request") for name in names(row[0])}
    fields = {field.name for field in GenerateRequest.DESCRIPTOR.fields}
    of_the_prompt = {"text", "chat", "token_ids", "partial_answers"}
    assert named == (fields - of_the_prompt) | {"tools", "template_arguments"}
    build_request(None, [], None, dict.fromkeys(named))


def test_every_argument_and_variable_of_connect_is_named() -> None:
    table = rows("Connecting")
    assert [names(row[0])[0] for row in table] == list(inspect.signature(AsyncClient.connect).parameters)
    variables = {
        connection.ADDRESS_VARIABLE,
        connection.KEY_VARIABLE,
        connection.CA_VARIABLE,
        connection.SERVER_NAME_VARIABLE,
    }
    assert {name for row in table for name in names(row[1])} == variables


def test_every_error_is_named_with_whether_another_try_helps() -> None:
    named = {name: row[2] == "yes" for row in rows("Errors") for name in names(row[0])}
    tree = {cls.__name__: cls.retryable for cls in errors.BY_CODE.values() if cls is not BatonError}
    # Of the admin port, and of the start of a worker: the SDK never raises them.
    del tree["UnknownRequest"], tree["ModelError"]
    assert named == tree


def test_numbers_are_the_codes() -> None:
    assert f"16 MiB\n({MAX_MESSAGE_BYTES:,} bytes)" in TEXT
    assert f"`total_s` ({Retry().total_s:g} by default)" in TEXT
    timeout_s = inspect.signature(AsyncClient.connect).parameters["timeout_s"].default
    assert f"{timeout_s:g} s by default" in TEXT
