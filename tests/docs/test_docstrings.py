"""Examples in docstrings of what users import are true."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.docs.snippets import differences, examples

MODULES = [
    "baton.api_keys",
    "baton.client",
    "baton.client_tls",
    "baton.errors",
    "baton.generation",
    "baton.retry",
    "baton.sampling",
    "baton.sync_client",
    "baton.targets",
]
EXAMPLES = [test for name in MODULES for test in examples(importlib.import_module(name))]


@pytest.mark.parametrize("test", EXAMPLES, ids=[test.name for test in EXAMPLES])
def test_an_example_is_true(test: doctest.DocTest, addresses: dict[str, str]) -> None:
    assert differences(test, addresses) == []


def test_the_ways_in_have_examples() -> None:
    shown = {test.name for test in EXAMPLES}
    calls = ["connect", "generate", "chat", "parse"]
    assert {f"baton.client.AsyncClient.{call}" for call in calls} <= shown
    assert {"baton.client", "baton.sync_client", "baton.generation.Generation", "baton.retry.Retry"} <= shown
