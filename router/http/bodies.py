"""Reads bodies where that holds nobody up: short ones at once, long ones in a thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from router.text import Offload

# Below this, reading takes less time than handing it to another thread.
INLINE_BYTES: Final = 64 * 1024

ReadT = TypeVar("ReadT")


class Bodies:
    """The bodies of all requests.

    offload: runs a function away from the event loop, on a bounded number of threads.
    """

    def __init__(self, offload: Offload) -> None:
        self._offload = offload

    async def read(self, body: bytes, read: Callable[[bytes], ReadT]) -> ReadT:
        """What `read` makes of a body, or what it raises."""
        return read(body) if len(body) <= INLINE_BYTES else await self._offload(partial(read, body))
