"""What holds for every test."""

from __future__ import annotations

import os

import pytest

# Kernels run interpreted, on a CPU, line by line. Triton looks at this once, when it is first imported,
# which torch does too: tests that compile kernels do so in a process of their own.
os.environ["TRITON_INTERPRET"] = "1"

# Clusters that many files share: each is started once, by the worker process that has all of its tests.
SHARED_FIXTURES = ("real_cluster", "tiny_cluster")
# They start as many processes as there are cores, and would do so twice.
SIMULATIONS = ("tests/simulation/", "tests/mutants/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The suite runs in two processes, the tests of a group in one of them."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))


def group(item: pytest.Item) -> str:
    """Tests that share what is dear to set up; otherwise those of a file."""
    if item.nodeid.startswith(SIMULATIONS):
        return "simulations"
    shared = [name for name in SHARED_FIXTURES if name in getattr(item, "fixturenames", ())]
    return shared[0] if shared else item.nodeid.split("::")[0]
