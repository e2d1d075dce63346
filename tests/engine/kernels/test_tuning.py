"""Measured choices: by a timer whose results are known, on interpreted kernels and on fakes of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import InternalError
from engine.kernels.add_rms_norm import KERNEL, add_rms_norm_launch
from engine.kernels.choices import UNMEASURED, Choices
from engine.kernels.environment import sources_digest
from engine.kernels.kernel import Launch
from engine.kernels.measurement_store import MeasurementStore
from engine.kernels.measurements import Ladder, Rung
from engine.kernels.timing import clock_timer
from engine.kernels.tuning import LADDER, tune
from tests.engine.kernels.tuning_fakes import (
    HERE,
    MIDDLE,
    NARROW,
    WIDE,
    FakeFunction,
    FakeTimer,
    contest,
    fake_launch,
    norm_launch,
    store_in,
)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.msg for record in caplog.records if record.levelno == logging.WARNING]  # type: ignore[misc]


def test_the_fastest_configuration_is_chosen_for_the_shape_that_was_measured() -> None:
    choices = tune([norm_launch()], timer=FakeTimer(3.0, 1.0, 2.0))

    assert choices.config(norm_launch()) == MIDDLE
    other = add_rms_norm_launch(torch.zeros(2, 4), None, torch.ones(4), 1e-5, torch.zeros(2, 4))
    assert choices.config(other) == NARROW


def test_of_equals_the_one_declared_first_is_chosen() -> None:
    assert tune([norm_launch()], timer=FakeTimer(2.0, 1.0, 1.0)).config(norm_launch()) == MIDDLE


def test_a_shape_is_measured_once() -> None:
    timer = FakeTimer(3.0, 2.0, 1.0)

    assert tune([norm_launch(), norm_launch()], timer=timer).config(norm_launch()) == WIDE
    assert timer.seconds == []


def test_what_a_kernel_changes_in_place_stays_as_it_was() -> None:
    memory = torch.randn(4, 33)
    before = memory.clone()

    tune([norm_launch(memory[1:3, 5:25])], timer=FakeTimer(1.0, 2.0, 3.0))

    assert torch.equal(memory, before)


def test_every_configuration_gets_copies_of_the_same_data_strides_and_alignment() -> None:
    function = FakeFunction()
    view = torch.arange(66.0).reshape(2, 33)[:, 5:25]
    shared = torch.tensor([3.0]).expand(2, 20)

    tune(
        [fake_launch(function, x=view, y=shared, z=None, empty=view[:0], n=7)], timer=FakeTimer(1.0, 2.0, 3.0)
    )

    assert [call["num_warps"] for call in function.calls] == [4] * 3 + [8] * 3 + [16] * 3
    for call in function.calls:
        assert torch.equal(call["x"], view)
        assert call["x"].data_ptr() != view.data_ptr()
        assert call["x"].stride() == (33, 1)
        assert call["x"].data_ptr() % 16 == view.data_ptr() % 16 == 4
        assert torch.equal(call["y"], shared)
        assert call["y"].stride() == (0, 0)
        assert call["empty"].shape == (0, 20)
        assert (call["z"], call["n"]) == (None, 7)


def test_measurements_are_read_back_by_the_next_start(tmp_path: Path) -> None:
    first = tune([norm_launch()], timer=FakeTimer(3.0, 2.0, 1.0), store=store_in(tmp_path))

    second = tune([norm_launch()], timer=FakeTimer(), store=store_in(tmp_path))

    assert second == first
    assert second.config(norm_launch()) == WIDE


def test_measurements_are_added_to_those_of_other_models(tmp_path: Path) -> None:
    function = FakeFunction()
    tune([fake_launch(function)], timer=FakeTimer(1.0, 2.0, 3.0), store=store_in(tmp_path))

    tune([norm_launch()], timer=FakeTimer(3.0, 2.0, 1.0), store=store_in(tmp_path))

    choices = tune([norm_launch(), fake_launch(function)], timer=FakeTimer(), store=store_in(tmp_path))
    assert choices.config(norm_launch()) == WIDE
    assert choices.config(fake_launch(function)).num_warps == 4


@pytest.mark.parametrize("changed", ["device", "driver", "torch_version", "triton_version", "sources"])
def test_another_environment_is_measured_anew(tmp_path: Path, changed: str) -> None:
    tune([norm_launch()], timer=FakeTimer(1.0, 2.0, 3.0), store=store_in(tmp_path))
    there = replace(HERE, **{changed: "another"})

    choices = tune([norm_launch()], timer=FakeTimer(3.0, 2.0, 1.0), store=store_in(tmp_path, there))

    assert choices.config(norm_launch()) == WIDE


def test_the_digest_of_sources_changes_with_content_and_names(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    seen = {sources_digest(tmp_path)}
    (tmp_path / "a.py").write_text("x = 2\n")
    seen.add(sources_digest(tmp_path))
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    seen.add(sources_digest(tmp_path))
    (tmp_path / "c.py").write_text("")
    seen.add(sources_digest(tmp_path))
    assert len(seen) == 4
    (tmp_path / "notes.txt").write_text("nothing that runs")
    assert sources_digest(tmp_path) in seen


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("{", "not JSON"),
        ('"seconds": 1.0', '"seconds": NaN'),
        ('"seconds": 1.0', '"seconds": "1"'),
        ('"num_warps": 4', '"num_warps": 4.5'),
        ('"constants": {}', '"constants": []'),
        ('"kernels"', '"others"'),
        ('"sources": "abc"', '"sources": "abd"'),
    ],
)
def test_a_damaged_or_foreign_file_is_measured_anew_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: str, instead: str
) -> None:
    store = store_in(tmp_path)
    tune([norm_launch()], timer=FakeTimer(1.0, 2.0, 3.0), store=store)
    content = store.path.read_text()
    assert written in content
    store.path.write_text(content.replace(written, instead, 1))

    choices = tune([norm_launch()], timer=FakeTimer(3.0, 2.0, 1.0), store=store)

    assert choices.config(norm_launch()) == WIDE
    (warning,) = warnings_of(caplog)
    assert warning["event"] == "kernels are measured anew"
    assert warning["file"] == str(store.path)
    assert tune([norm_launch()], timer=FakeTimer(), store=store) == choices


def test_a_configuration_that_is_not_declared_any_more_is_not_chosen(tmp_path: Path) -> None:
    tune([norm_launch()], timer=FakeTimer(1.0, 2.0, 3.0), store=store_in(tmp_path))
    fewer = replace(norm_launch(), kernel=replace(KERNEL, configs=KERNEL.configs[1:]))

    choices = tune([fewer], timer=FakeTimer(2.0, 1.0), store=store_in(tmp_path))

    assert choices.config(fewer) == WIDE


def test_a_configuration_that_does_not_run_is_dropped_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launch = fake_launch(FakeFunction(failing=(8,)))

    choices = tune([launch], timer=FakeTimer(2.0, 1.0), store=store_in(tmp_path))

    assert choices.config(launch).num_warps == 16
    (warning,) = warnings_of(caplog)
    assert (warning["kernel"], warning["configuration"]) == ("fake", "BLOCK=64 warps=8 stages=1")
    assert "shared memory" in warning["reason"]
    (race,) = store_in(tmp_path).read().races.values()
    assert (race.num_declared, len(race.times)) == (3, 2)


def test_a_kernel_that_does_not_run_at_all_is_named() -> None:
    with pytest.raises(InternalError, match=r"kernel fake .*'width': 20.*shared memory"):
        tune([fake_launch(FakeFunction(failing=(4, 8, 16)))], timer=FakeTimer())


def test_a_start_that_is_cut_off_has_kept_what_it_measured(tmp_path: Path) -> None:
    launches = [norm_launch(), fake_launch(FakeFunction(failing=(4, 8, 16)))]
    with pytest.raises(InternalError):
        tune(launches, timer=FakeTimer(3.0, 2.0, 1.0), store=store_in(tmp_path))

    choices = tune([norm_launch()], timer=FakeTimer(), store=store_in(tmp_path))

    assert choices.config(norm_launch()) == WIDE


def test_data_is_made_for_what_is_to_be_measured_alone(tmp_path: Path) -> None:
    made: list[Launch] = []

    def make(planned: Launch) -> Launch:
        made.append(planned)
        return norm_launch()

    planned = [norm_launch(torch.empty(2, 20, device="meta")) for _ in range(2)]
    first = tune(planned, timer=FakeTimer(3.0, 2.0, 1.0), store=store_in(tmp_path), made=make)
    assert made == planned[:1]

    second = tune(planned, timer=FakeTimer(), store=store_in(tmp_path), made=make)
    assert made == planned[:1]
    assert first == second


def test_the_crossing_is_where_the_kernel_wins_for_good(tmp_path: Path) -> None:
    calls: list[tuple[str, int, Choices]] = []
    # Of 12 lengths the kernel wins at 2 by chance, and from 64 on.
    kernel_s = [2.0, 0.5, 2.0, 2.0, 2.0, 2.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5]
    timer = FakeTimer(3.0, 2.0, 1.0, *(seconds for kernel in kernel_s for seconds in (kernel, 1.0)))

    choices = tune([norm_launch()], [contest(calls)], timer=timer, store=store_in(tmp_path))

    assert choices.crossings == {"op": 64}
    assert [choices.uses_kernel("op", num_tokens) for num_tokens in (1, 2, 63, 64, 5000)] == [
        False, False, False, True, True,
    ]  # fmt: skip
    assert [call[:2] for call in calls[::3]] == [
        (side, num_tokens) for num_tokens in LADDER for side in ("kernel", "vendor")
    ]
    assert calls[0][2].config(norm_launch()) == WIDE
    assert tune([norm_launch()], [contest([])], timer=FakeTimer(), store=store_in(tmp_path)) == choices


def test_a_kernel_that_is_slower_on_the_last_length_is_never_used() -> None:
    timer = FakeTimer(*[1.0, 2.0] * 11, 2.0, 1.0)

    choices = tune([], [contest([])], timer=timer)

    assert choices.crossings == {"op": None}
    assert not choices.uses_kernel("op", 1)
    assert not choices.uses_kernel("op", 1 << 20)


def test_a_crossing_belongs_to_its_shape(tmp_path: Path) -> None:
    tune([], [contest([])], timer=FakeTimer(*[2.0, 1.0] * 12), store=store_in(tmp_path))
    other = replace(contest([]), shape=(("width", 21),))

    choices = tune([], [other], timer=FakeTimer(*[1.0, 2.0] * 12), store=store_in(tmp_path))

    assert choices.crossings == {"op": 1}


def test_what_was_not_measured_is_the_kernels() -> None:
    assert UNMEASURED.uses_kernel("op", 1)


def test_a_ladder_that_is_won_throughout_is_the_kernels_from_one_token_on() -> None:
    rungs = tuple(Rung(num_tokens=tokens, kernel_s=1.0, vendor_s=1.0) for tokens in (1, 2, 4))
    assert Ladder(op="op", shape=(), rungs=rungs).crossing == 1


def test_of_two_processes_at_once_one_measures_and_the_other_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A lock belongs to an opened file, so two threads that open it are as good as two processes.
    waits, found = threading.Event(), []

    class Waits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting" in str(record.msg):
                waits.set()

    logger, handler = logging.getLogger("engine.kernels.measurement_store"), Waits()
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.addHandler(handler)
    second = threading.Thread(
        target=lambda: found.append(tune([norm_launch()], timer=FakeTimer(), store=store_in(tmp_path)))
    )

    def timer(run: Callable[[], object]) -> float:
        if second.ident is None:
            second.start()
            assert waits.wait(60)
        return seconds.pop(0)

    seconds = [3.0, 2.0, 1.0]
    first = tune([norm_launch()], timer=timer, store=store_in(tmp_path))
    second.join(60)
    logger.removeHandler(handler)

    assert found == [first]


def test_a_write_that_fails_leaves_the_file_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path)
    tune([norm_launch()], timer=FakeTimer(3.0, 2.0, 1.0), store=store)
    store.path.with_suffix(".part").mkdir()

    choices = tune([norm_launch(), fake_launch(FakeFunction())], timer=FakeTimer(1.0, 2.0, 3.0), store=store)

    assert len(choices.measured) == 2
    assert [warning["event"] for warning in warnings_of(caplog)] == ["measurements of kernels are not kept"]
    assert len(store.read().races) == 1


def test_a_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)

    assert MeasurementStore.open(tmp_path / "kernels", HERE) is None
    (warning,) = warnings_of(caplog)
    assert "chmod 700" in warning["reason"]


def test_only_this_user_reads_the_folder_that_is_made(tmp_path: Path) -> None:
    store = store_in(tmp_path)

    assert store.path.parent.stat().st_mode & 0o777 == 0o700
    assert store.path.name == "a_device_80_gb_-1.2-2.0-3.0-abc.json"


def test_a_clock_gives_the_median_without_the_first_run() -> None:
    # A run takes 100 s at first, then 1, 5, 2, 9 and 3: the median is 3.
    now, durations = [0.0], [100.0, 1.0, 5.0, 2.0, 9.0, 3.0]

    def run() -> None:
        now[0] += durations.pop(0)

    assert clock_timer(partial(now.__getitem__, 0))(run) == 3.0
    assert durations == []
