from __future__ import annotations

import pytest

from baton.doctor import versions

REQUIREMENTS = [
    "grpcio>=1.80",
    "rich>=14",
    'redis>=6; extra == "router"',
    'torch>=2.11; extra == "worker"',
    'triton>=3.6; sys_platform == "linux" and extra == "worker"',
    'torch>=2.11; extra == "pull"',
    'pytest>=9; extra == "dev"',
    'baton-serve[router,worker]; extra == "all"',
]


def states(**there: str) -> dict[str, str]:
    return {check.name: check.state for check in versions.packages(REQUIREMENTS, there.get)}


def test_a_base_install_lacks_extras_and_that_is_fine() -> None:
    assert states(grpcio="1.85.1", rich="15.0") == {
        "grpcio": "ok", "redis": "ok", "torch": "ok", "triton": "ok"
    }  # fmt: skip


def test_what_the_base_needs_must_be_there() -> None:
    assert states(grpcio="1.85.1")["rich"] == "problem"


def test_what_is_there_must_be_new_enough() -> None:
    found = states(grpcio="1.79.9", rich="14", torch="2.9.1+cu128", triton="3.10.0")
    assert found == {"grpcio": "problem", "redis": "ok", "torch": "problem", "triton": "ok"}


@pytest.mark.parametrize(
    ("version", "parts"), [("2.11.0+cpu", (2, 11, 0)), ("0.61b0", (0, 61)), ("3", (3,)), ("v2", ())]
)
def test_the_numbers_of_a_version(version, parts) -> None:
    assert versions.parts(version) == parts


def test_an_old_python_is_a_problem() -> None:
    assert versions.python("3.99").state == "problem"
    assert versions.python("3.11").state == "ok"


def test_this_install_is_complete() -> None:
    assert {check.state for check in versions.checks()} == {"ok"}
