"""The relay of layer news, with hops that a test takes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.layer_relay import LayerRelay
from engine.stored import DONE, Stored


class Rig:
    """A relay whose hops wait in a list; told: what has come of them."""

    def __init__(self) -> None:
        self.hops: list[Callable[[], None]] = []
        self.told: list[tuple[int, Any]] = []
        self.relay = LayerRelay(lambda *news: self.told.append(news), self.hops.append)

    def hop(self) -> None:
        self.hops.pop(0)()


def news_of(event: object) -> Stored:
    return Stored(event)  # type: ignore[arg-type]


def test_each_layer_is_told_of_if_the_loop_keeps_up() -> None:
    rig, news = Rig(), [news_of(1), news_of(2)]
    for number, stored in enumerate(news, start=1):
        rig.relay.stored(number, stored)
        rig.hop()
    assert rig.told == [(1, news[0]), (2, news[1])]
    assert rig.hops == []


def test_a_busy_loop_hears_of_each_layer_with_its_event_in_one_hop() -> None:
    rig, news = Rig(), [(number, news_of(number)) for number in (1, 2, 3)]
    for number, stored in news:
        rig.relay.stored(number, stored)
    assert len(rig.hops) == 1
    rig.hop()
    assert rig.told == news
    rig.relay.stored(4, DONE)
    assert len(rig.hops) == 1
    rig.hop()
    assert rig.told[3:] == [(4, DONE)]


def test_after_the_end_nothing_is_told_and_no_hop_is_begun() -> None:
    rig = Rig()
    rig.relay.stored(1, DONE)
    rig.relay.close()
    rig.hop()
    rig.relay.stored(2, DONE)
    assert rig.told == []
    assert rig.hops == []


def test_an_error_is_kept_and_ends_the_news() -> None:
    def fail(num_layers: int, _stored: object) -> None:
        heard.append(num_layers)
        raise error

    error, heard, hops = KeyError("transfer"), list[int](), list[Callable[[], None]]()
    relay = LayerRelay(fail, hops.append)
    relay.stored(1, DONE)
    relay.stored(2, DONE)
    hops.pop()()
    relay.stored(3, DONE)
    assert hops == []
    assert (heard, relay.error) == ([1], error)
