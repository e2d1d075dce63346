"""The router that documents reach at the addresses they name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.baton.scripted_router import background
from tests.docs.answers import answer


@pytest.fixture(scope="session")
def addresses() -> Iterator[dict[str, str]]:
    """What a document says of addresses, and what is meant."""
    with background(answer) as (_, address):
        yield {"127.0.0.1:50051": address, "127.0.0.1:50052": address}
