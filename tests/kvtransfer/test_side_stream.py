"""The stream beside the one that computes, as far as it can be seen without a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtransfer.side_stream import SideStream


def test_kernels_of_transfers_go_before_those_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, dict[str, int]]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, **options: made.append((device, options)))
    SideStream(torch.device("cuda", 1))
    # CUDA: lower numbers go first; that of a stream of which nothing is said is 0.
    assert made == [(torch.device("cuda", 1), {"priority": -1})]
