"""Waiting for a device's events without holding up the event loop, or those who wait for nothing."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import torch

from kvtransfer.event_thread import EventThread
from tests.kvtransfer.device import Device, Event, fired
from tests.kvtransfer.rig import until


def thread_of(device: Device) -> EventThread:
    return EventThread(torch.device("cpu"), stream=device)


async def test_an_event_that_has_fired_is_not_waited_for() -> None:
    device = Device()
    with closing(thread_of(device)) as events:
        await events.fired(fired())
    assert device.waited_for == []


async def test_the_loop_goes_on_until_the_event_fires() -> None:
    device, event = Device(), Event()
    with closing(thread_of(device)) as events:
        waiting = asyncio.create_task(events.fired(event))  # type: ignore[arg-type]
        await until(lambda: device.waited_for == [event])
        assert not waiting.done()
        event.set()
        await asyncio.wait_for(waiting, 5)


async def test_who_gives_up_leaves_the_others_waiting() -> None:
    device, first, second = Device(), Event(), Event()
    with closing(thread_of(device)) as events:
        left: asyncio.Task[Any] = asyncio.create_task(events.fired(first))  # type: ignore[arg-type]
        await until(lambda: device.waited_for == [first])
        stays = asyncio.create_task(events.fired(second))  # type: ignore[arg-type]
        left.cancel()
        await asyncio.wait([left])
        assert left.cancelled()
        first.set()
        second.set()
        await asyncio.wait_for(stays, 5)
    assert device.waited_for in ([first], [first, second])
