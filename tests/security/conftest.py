"""What tests of security share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.fuzzing import Served


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Both doors, which answer until the last test of a file has asked."""
    with Served(tmp_path_factory.mktemp("fuzz")) as running:
        yield running
