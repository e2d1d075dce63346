"""How many bytes of tensors live at a time, for tests of memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storage of what operators return, for as long as a tensor of it lives.

    What an operator allocates and frees inside is not seen. now, peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known | self._seen:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        self._seen.add(address)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, address, num_bytes)

    def _forget(self, address: int, num_bytes: int) -> None:
        self._seen.discard(address)
        self.now -= num_bytes
