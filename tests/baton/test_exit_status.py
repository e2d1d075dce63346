"""Statuses of roles that cannot run, there and back."""

from __future__ import annotations

import pytest

from baton.cli.exit_codes import exit_code
from baton.errors import BatonError, ConfigError, InternalError, ModelError, Unavailable
from baton.exit_status import error_of, status_of


@pytest.mark.parametrize(("kind", "status"), [(ConfigError, 2), (ModelError, 5)])
def test_a_setting_and_a_model_have_a_status_that_names_them(kind: type[BatonError], status: int) -> None:
    assert status_of(kind("x")) == status
    assert error_of(status) is kind


@pytest.mark.parametrize("status", [0, 1, 3, 4, -9])
def test_any_other_end_says_only_that_nothing_serves(status: int) -> None:
    assert error_of(status) is Unavailable


def test_a_number_means_the_same_of_a_role_and_of_the_command() -> None:
    for error in (ConfigError("x"), ModelError("x"), InternalError("x")):
        assert status_of(error) == exit_code(error)


def test_other_errors_are_failures() -> None:
    assert status_of(Unavailable("Redis is away")) == 1
