"""What holds for every test."""

from __future__ import annotations

import os

import pytest

# Kernels run interpreted, on a CPU, line by line. Triton looks at this once, when it is first imported,
# which torch does too: tests that compile kernels do so in a process of their own.
os.environ["TRITON_INTERPRET"] = "1"

# Clusters that many files share: each is started once, by the worker process that has all of its tests.
SHARED_FIXTURES = ("real_cluster", "tiny_cluster")
# Files whose tests share nothing that is dear to set up and are long: any worker process may take any of them.
APART = ("tests/simulation/", "tests/mutants/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The suite runs in as many processes as there are cores, a file in one of them."""
    for item in items:
        if item.nodeid.startswith(APART):
            continue
        shared = [name for name in SHARED_FIXTURES if name in getattr(item, "fixturenames", ())]
        item.add_marker(pytest.mark.xdist_group(shared[0] if shared else item.nodeid.split("::")[0]))
