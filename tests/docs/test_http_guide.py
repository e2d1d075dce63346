"""docs/http.md says what the HTTP door does: its program runs, and its tables are the code's."""

from __future__ import annotations

import re

import pytest

from router.http import errors, server
from router.http.connection import REQUEST_S
from router.http.event_stream import PING_S
from router.http.exchange import MAX_BODY_BYTES, TIMEOUT_HEADER
from router.http.schema import NO_EFFECT, REFUSED, Body, GenerationBody
from router.http.schema_chat import ChatBody, Message
from router.http.schema_completions import MAX_PROMPTS, CompletionBody
from router.http.schema_tokens import DetokenizeBody, TokenizeBody
from router.http.validation import MAX_MARKS
from tests.docs.snippets import ROOT, Snippet, blocks

GUIDE = ROOT / "docs" / "http.md"
TEXT = GUIDE.read_text(encoding="utf-8")
FLAT = " ".join(TEXT.split())
PROGRAMS = blocks(GUIDE)


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.place for program in PROGRAMS])
def test_a_program_runs(program: Snippet, http_address: str) -> None:
    assert program.run({"127.0.0.1:8000": http_address}) == "Hamburg\nHam|burg|"


def rows(heading: str, text: str = TEXT) -> list[list[str]]:
    """The cells of the first table after a line, without its head."""
    lines = iter(text.partition(f"\n{heading}\n")[2].splitlines())
    table = []
    for line in lines:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip("|").split("|")])
        elif table:
            break
    return table[2:]


def effects(model: type[Body], but: type[Body] | None = None) -> dict[str, str]:
    """What the code makes of each field."""
    words = {NO_EFFECT: "none", REFUSED: "refused"}
    inherited = set() if but is None else set(but.model_fields)
    return {
        field.alias or name: words.get(field.description or "", "taken")
        for name, field in model.model_fields.items()
        if name not in inherited
    }


@pytest.mark.parametrize(
    ("heading", "model", "base"),
    [
        ("### Both endpoints", GenerationBody, None),
        ("### Completions", CompletionBody, GenerationBody),
        ("### Chats", ChatBody, GenerationBody),
        ("A message:", Message, None),
        ("### Tokenize", TokenizeBody, None),
        ("### Detokenize", DetokenizeBody, None),
    ],
)
def test_every_field_is_listed_with_its_effect(
    heading: str, model: type[Body], base: type[Body] | None
) -> None:
    table = rows(heading)
    listed = {row[0].strip("`"): row[1] for row in table}
    assert len(listed) == len(table)
    assert listed == effects(model, base)


def test_every_status_is_listed() -> None:
    listed = {(int(row[0]), code) for row in rows("## Errors") for code in re.findall(r"`(\w+)`", row[2])}
    forms = [
        *errors.FORMS.values(),
        errors.NOT_FOUND,
        errors.WRONG_METHOD,
        errors.TOO_LARGE,
        errors.WRONG_TYPE,
        errors.HEADERS_TOO_LARGE,
    ]
    # The other is not of this port.
    expected = {(form.status, form.code) for form in forms if form.code != "request_not_found"}
    assert listed == expected | {(500, "internal"), (500, "poison_request"), (500, "non_finite_logits")}


def test_numbers_and_names_are_the_codes() -> None:
    for said in (
        f"{PING_S:g} s of silence",
        f"longer than {MAX_BODY_BYTES >> 20} MiB",
        f"kept for {server.KEEP_ALIVE_S} s",
        f"arrive within {REQUEST_S:g} s",
        f"at most {server.MAX_HEADER_BYTES >> 10} KiB of headers",
        f"at most {server.SEND_BUFFER_BYTES >> 10} KiB",
        f"up to {MAX_PROMPTS} of either",
        f"at most {MAX_MARKS} brackets, braces and colons",
        f"`{TIMEOUT_HEADER}`",
    ):
        assert said in FLAT, said
