"""What a frame costs the event loop of a receiver with a device: one wait, and no compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels import block_copy
from engine.kernels.choices import UNMEASURED, Choices
from kvtransfer.device_writer import DeviceWriter
from kvtransfer.plan import MAX_FRAME_BYTES
from kvtransfer.scatter import format_of
from kvtransfer.wire import Frame, FrameSpec
from tests.kvtransfer.rig import make_cache
from tests.kvtransfer.sent_tokens import SentTokens, source_format, target_cache

torch.set_num_threads(1)

ATEN = torch.ops.aten


class Operations(TorchDispatchMode):
    """What is asked of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((function.overloadpacket, args))
        return function(*args, **(kwargs or {}))


class Watched:
    """A stream that notes what is launched on it."""

    def __init__(self) -> None:
        self.operations = Operations()
        self.num_waits = 0

    @contextmanager
    def behind(self, event: torch.cuda.Event | None) -> Iterator[None]:
        with self.operations:
            yield
        self.num_waits += 1

    def copies(self) -> list[tuple[torch.dtype, bool]]:
        """Element type of each copy, and whether it waits for nothing."""
        found = [args for name, args in self.operations.calls if name is ATEN.copy_]
        return [(args[0].dtype, len(args) > 2 and args[2]) for args in found]


Scattered = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def scattered(monkeypatch: pytest.MonkeyPatch) -> list[Scattered]:
    """The calls of the kernel: payload's rows, ids, and the cache's layers."""
    calls: list[Scattered] = []

    def scatter(rows: torch.Tensor, ids: torch.Tensor, target: torch.Tensor, *, choices: Choices) -> None:
        calls.append((rows, ids, target))
        # As a kernel: none of torch's operations.
        with torch.utils._python_dispatch._disable_current_modes():
            target[ids] = rows.to(target.dtype)

    monkeypatch.setattr(block_copy, "scatter_blocks", scatter)
    return calls


@pytest.mark.parametrize("choices", [None, UNMEASURED], ids=["torch", "kernels"])
def test_a_frame_is_waited_for_once_and_goes_to_the_device_in_one_copy(
    choices: Choices | None, scattered: list[Scattered]
) -> None:
    # Tokens 5 to 74, of blocks of 16 and with large values: blocks cut at both ends, and a count to report.
    sent = SentTokens(fmt=source_format(16, "float32", "NHD"), num_tokens=75, has_large=True)
    cache, stream = target_cache(5, 16, "float16", "HND", "as_built"), Watched()
    writer = DeviceWriter(cache, choices, stream=stream)
    num_saturated = writer.write(
        sent.fmt, [2, 4, 0, 3, 1], sent.frame(0, range(5), range(2)), num_held_tokens=5
    )
    assert num_saturated > 0
    assert stream.num_waits == 1
    assert [ids.tolist() for _, ids, _ in scattered] == ([[4, 0, 3]] if choices else [])
    # There the payload with its ids, back the count; the host waits for neither.
    assert stream.copies() == [(torch.uint8, True), (torch.int64, True)]
    names = {name for name, _ in stream.operations.calls}
    # Reading a number, and tensors made of the host's lists: each would be a wait of its own.
    assert not names & {ATEN._local_scalar_dense, ATEN.lift_fresh, ATEN.nonzero}
    assert ATEN.index_put_ in names


def test_the_kernel_sees_the_same_alignment_whatever_block_is_the_first(scattered: list[Scattered]) -> None:
    sent = SentTokens(fmt=source_format(16, "float32", "HND"), num_tokens=80)
    cache = target_cache(5, 16, "float32", "HND", "as_built")
    writer = DeviceWriter(cache, UNMEASURED, stream=Watched())
    for num_held in (0, 5, 16, 20, 33):
        writer.write(sent.fmt, [2, 4, 0, 3, 1], sent.frame(0, range(5), range(2)), num_held_tokens=num_held)
    assert [ids.tolist() for _, ids, _ in scattered] == [
        [2, 4, 0, 3, 1],
        [4, 0, 3, 1],
        [4, 0, 3, 1],
        [0, 3, 1],
        [3, 1],
    ]
    assert [(rows.data_ptr() % 16, ids.data_ptr() % 16) for rows, ids, _ in scattered] == [(0, 0)] * 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_after_the_warm_up_no_sender_brings_a_kernel_that_is_new(
    dtype: torch.dtype, scattered: list[Scattered]
) -> None:
    cache = make_cache(4, dtype=dtype, head_dim=16)
    cache.logical.fill_(7.0)
    writer = DeviceWriter(cache, UNMEASURED, stream=Watched())
    writer.warm_up()

    def kinds() -> set[Any]:
        """What Triton compiles by: element types, and which strides and addresses are multiples of 16."""
        return {
            (rows.dtype, tuple(stride % 16 for stride in rows.stride()[:-1]), rows.data_ptr() % 16)
            for rows, _, _ in scattered
        }

    warm = kinds()
    assert {kind[0] for kind in warm} == {torch.float32, torch.bfloat16, torch.float16}
    assert bool((cache.logical[1:] == 7.0).all())
    spec = FrameSpec(index=0, first_block=0, num_blocks=3, num_tokens=48, first_layer=0, num_layers=2)
    for name in ("float32", "bfloat16", "float16"):
        for layout in ("HND", "NHD"):
            fmt = dataclasses.replace(format_of(cache.shape), dtype=name, layout=layout)
            for layers_first in (False, True):
                payload = memoryview(bytes(spec.payload_bytes(fmt)))
                writer.write(fmt, [1, 2, 3], Frame(spec, payload, layers_first))
    assert kinds() == warm


def test_a_frame_that_is_larger_than_usual_finds_room() -> None:
    cache = make_cache(1, block_size=1, num_layers=1, num_kv_heads=1, head_dim=MAX_FRAME_BYTES // 4)
    fmt, spec = format_of(cache.shape), FrameSpec(
        index=0, first_block=0, num_blocks=1, num_tokens=1, first_layer=0, num_layers=1
    )  # fmt: skip
    values = torch.arange(MAX_FRAME_BYTES // 2, dtype=torch.float32)
    writer = DeviceWriter(cache, None, stream=Watched())
    writer.write(fmt, [0], Frame(spec, memoryview(values.numpy().tobytes())))
    assert torch.equal(cache.logical.flatten(), values)
