"""What the GPU's benchmark prints and keeps, and what is left of a run that was cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.on_gpu.section import GpuRow
from benchmarks.on_gpu.shapes import STEPS, step_name
from benchmarks.on_gpu.table import MAX_COLUMNS, MAX_LINES, METRIC_COLUMNS, line, table

ROOT = Path(__file__).parents[2]


def row(metric: str, **fields: object) -> GpuRow:
    return GpuRow(**{"metric": metric, "unit": "ms", "ours": 1.0, "runs": 1, **fields})


def test_the_table_is_short_and_has_what_failed_first_and_what_was_not_run_last() -> None:
    rows = [GpuRow.not_run("late"), *(row(f"figure {number}", in_table=True) for number in range(60))]
    rows += [row("hidden"), GpuRow.failed("bad", "words " * 50)]

    lines = table(rows)

    assert len(lines) == MAX_LINES
    assert lines[0].split()[:3] == ["bad", "failed:", "words"]
    assert len(lines[0]) == MAX_COLUMNS
    assert lines[1].startswith("figure 0")
    assert lines[-1] == "63 rows, 1 failed, 1 not run; 23 of this table are in the file alone"
    assert not any("hidden" in line for line in lines)
    assert table(rows[:5])[-2].split() == ["late", "not", "run:", "no", "time", "left"]


def test_figures_without_room_are_left_out_whole() -> None:
    also = {"bandwidth": 0.734, "x plain": 5.08, "tokens/s": 5333.3, "plain ms": 122.0}
    said = line(row("decode 128 x 4096", ours=24.0, peer_name="83% of bandwidth", ratio=0.888, also=also))

    assert (
        said
        == "decode 128 x 4096                            24 ms       0.89x 83% of bandwidth, bandwidth 0.734"
    )
    assert len(said + ", x plain 5.08") > MAX_COLUMNS


def test_names_of_kernels_at_their_steps_have_room() -> None:
    steps = [step_name(step) for step in STEPS]
    names = [f"embed_rms_norm_qkv, {step}" for step in steps]
    names += [f"rope_store_kv staged, {step}" for step in steps if step.startswith("prefill")]

    assert max(map(len, names)) <= METRIC_COLUMNS


def planned_rows(monkeypatch: pytest.MonkeyPatch, rows: Iterator[GpuRow]) -> None:
    """What the benchmark is to measure."""
    plan: Any = ModuleType("benchmarks.on_gpu.plan")
    plan.planned = lambda is_quick: ()
    plan.measured = lambda *_, sections: rows
    monkeypatch.setitem(sys.modules, plan.__name__, plan)
    for name in ("BATON_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        # Set by the benchmark; put back by the fixture.
        monkeypatch.setenv(name, "")


def kept_rows(folder: Path) -> list[str]:
    (kept,) = folder.glob("*.json")
    return [each["metric"] for each in json.loads(kept.read_text())["rows"]]


def test_rows_before_an_exception_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rows() -> Iterator[GpuRow]:
        yield row("first")
        # Every row is there before the next one.
        (unfinished,) = tmp_path.glob("*.jsonl")
        yield row(json.loads(unfinished.read_text())["metric"] + " again")
        raise KeyError("a defect")

    planned_rows(monkeypatch, rows())

    with pytest.raises(KeyError, match="a defect"):
        gpu.main(["--device", "cpu", "--results", str(tmp_path)])

    assert kept_rows(tmp_path) == ["first", "first again"]
    assert list(tmp_path.glob("*.jsonl")) == []


def test_rows_are_kept_before_the_folder_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Busy(tempfile.TemporaryDirectory[str]):
        def cleanup(self) -> None:
            super().cleanup()
            raise OSError("Directory not empty")

        def __exit__(self, *_: object) -> None:
            self.cleanup()

    planned_rows(monkeypatch, iter([row("first")]))
    monkeypatch.setattr(tempfile, "TemporaryDirectory", Busy)

    with pytest.raises(OSError, match="not empty"):
        gpu.main(["--device", "cpu", "--results", str(tmp_path)])

    assert kept_rows(tmp_path) == ["first"]


@dataclass
class CutOff:
    """A benchmark whose section hangs. pids: of the section, and of what it has started."""

    process: subprocess.Popen[str]
    pids: list[int]
    results: Path
    temporary: Path

    def has_ended(self) -> bool:
        """Gone, or zombies that nobody waits for: within a few seconds."""
        deadline = time.monotonic() + 10
        while any(map(is_running, self.pids)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def cut_off(tmp_path: Path) -> Iterator[CutOff]:
    temporary, results, started = (tmp_path / name for name in ("temporary", "results", "started"))
    temporary.mkdir()
    options = ["--device", "cpu", "--results", str(results)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.gpu_cut_off", str(started), *options],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.01)
    pids = [int(pid) for pid in started.read_text().split()]
    yield CutOff(process, pids, results, temporary)
    for pid in filter(is_running, pids):
        os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_terminated_run_keeps_its_rows_and_leaves_nothing(cut_off: CutOff) -> None:
    cut_off.process.terminate()
    printed, _ = cut_off.process.communicate(timeout=20)

    assert cut_off.process.returncode == 128 + signal.SIGTERM
    assert kept_rows(cut_off.results) == ["first"]
    assert printed.splitlines()[-1] == "1 rows, 0 failed, 0 not run"
    assert list(cut_off.temporary.iterdir()) == []
    assert cut_off.has_ended()


def test_a_killed_run_has_written_its_rows_and_its_section_ends(cut_off: CutOff) -> None:
    cut_off.process.kill()
    cut_off.process.wait(20)

    (unfinished,) = cut_off.results.iterdir()
    assert json.loads(unfinished.read_text())["metric"] == "first"
    assert cut_off.process.stdout is not None
    assert cut_off.process.stdout.readline().startswith("first ")
    # What the section had started is nobody's, and may be anything.
    del cut_off.pids[1:]
    assert cut_off.has_ended()
