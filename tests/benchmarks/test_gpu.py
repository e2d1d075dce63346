"""The GPU's benchmark on a CPU: every section's code with interpreted kernels, and what holds it together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.on_gpu.apart import rows_apart
from benchmarks.on_gpu.facts import COPY, PRODUCT, ceilings
from benchmarks.on_gpu.formulas import decode_bytes, kv_bytes, prefill_flops, weight_bytes
from benchmarks.on_gpu.plan import measured, planned
from benchmarks.on_gpu.section import Budget, GpuRow, Section
from benchmarks.on_gpu.shapes import MODEL_STEPS, STEPS, step_name
from benchmarks.on_gpu.table import MAX_COLUMNS, MAX_LINES
from benchmarks.on_gpu.transfer_model import SIZES
from benchmarks.report import hardware
from engine.kernels.model_launches import Step

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
KERNELS = (
    "add_rms_norm",
    "block_copy",
    "embed_rms_norm_qkv",
    "gated_activation",
    "paged_attention",
    "prefill_attention",
    "rope_store_kv",
)


def row(metric: str, **fields: object) -> GpuRow:
    return GpuRow(**{"metric": metric, "unit": "ms", "ours": 1.0, "runs": 1, **fields})


def run_of(*rows: GpuRow, then: object = None) -> Section:
    """A section with these rows, which ends with an exception or a call."""

    def run(_device: torch.device, _budget: Budget, _rows: Sequence[GpuRow]) -> Iterator[GpuRow]:
        yield from rows
        if isinstance(then, Exception):
            raise then
        if callable(then):
            then()

    return Section("fake", 1.0, run)


@pytest.mark.timeout(120)
def test_every_section_but_the_transfer_runs_interpreted(tmp_path: Path) -> None:
    names = [section.name for section in planned(is_quick=True) if section.name != "transfer"]
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--quick"]
    files = ["--json", str(tmp_path / "rows.json"), "--results", str(tmp_path)]

    ended = subprocess.run(
        [*command, *files, "--sections", *names], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = {each["metric"]: each for each in json.loads((tmp_path / "rows.json").read_text())}
    for kernel in KERNELS:
        assert rows[f"check {kernel}"]["ours"] == rows[f"check {kernel}"]["runs"] > 0
    for metric in (
        "fused as plain, fp32 tokens",
        "prefill 9",
        "decode 2 x 5",
        "paged_attention, decode 2 x 5",
        "decode 2 x 5, compiled",
    ):
        assert rows[metric]["ours"] > 0
    assert [each["metric"] for each in rows.values() if each["trouble"].startswith("failed")] == []
    assert {f"section {name}" for name in names} <= rows.keys()
    last = ended.stdout.rpartition("\n\n")[2].splitlines()
    assert last[-1].endswith("0 failed, 2 not run")
    assert len(last) <= MAX_LINES
    assert max(map(len, last)) <= MAX_COLUMNS
    (kept,) = tmp_path.glob("*-gpu-interpreter-*.json")
    assert json.loads(kept.read_text())["accelerator"] == "interpreter"


@pytest.mark.timeout(120)
def test_what_is_compiled_ahead_is_what_the_dispatcher_looks_for(tmp_path: Path) -> None:
    variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    del variables["TRITON_INTERPRET"]

    printed = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.gpu_compiling"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        check=True,
    ).stdout

    found = json.loads(printed)
    assert found["calls"] == 4
    # A program each, and the one that Triton's launcher is, if it has been built.
    assert found["afterwards"] == found["compiled"] >= 4


def test_a_section_that_raises_keeps_its_rows_and_gets_another() -> None:
    good = row("good", also={"GB/s": 2.0})

    rows = list(rows_apart(run_of(good, then=ValueError("no such thing")), CPU, Budget.of(30)))

    assert rows == [good, GpuRow.failed("fake", "ValueError: no such thing")]


def test_a_section_whose_process_dies_has_failed() -> None:
    rows = list(rows_apart(run_of(row("good"), then=lambda: os._exit(9)), CPU, Budget.of(30)))

    assert [each.trouble for each in rows] == ["", "failed: its process ended with 9"]


@pytest.mark.parametrize(("is_optional", "word"), [(False, "failed"), (True, "not run")])
def test_a_section_that_does_not_end_is_killed_with_what_it_started(
    is_optional: bool, word: str, tmp_path: Path
) -> None:
    def hang() -> None:
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "pid").write_text(str(child.pid))
        child.wait()

    section = run_of(row("good"), then=hang)
    section = Section("fake", 1.0, section.run, is_optional=is_optional)
    rows = rows_apart(section, CPU, Budget.of(0.2), grace_s=0.2)

    assert [each.trouble for each in rows] == ["", f"{word}: did not end in its time"]
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    # Gone, or a zombie that nobody waits for.
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_a_section_leaves_goes_to_those_behind_it() -> None:
    def run(_device: torch.device, budget: Budget, _rows: Sequence[GpuRow]) -> Iterator[GpuRow]:
        yield row("left", ours=budget.left)

    lefts = [Section(name, seconds, run) for name, seconds in (("a", 10), ("b", 20), ("c", 30))]

    rows = measured("cpu", 120, sections=lefts, clock=lambda: 5.0)

    assert [each.ours for each in rows if each.metric == "left"] == [20, 60, 120]


def test_sections_for_which_nothing_is_left_are_rows_too() -> None:
    ticks = iter(range(0, 1000, 7))
    sections = [run_of(row("good")), run_of(row("good"))]

    rows = measured("cpu", 2, sections=sections, clock=lambda: float(next(ticks)))

    assert [each.trouble for each in rows] == ["not run: no time left"] * 2


def test_an_unknown_section_is_refused() -> None:
    with pytest.raises(ValueError, match="no section speed"):
        list(measured("cpu", 1, ["speed"], sections=planned(is_quick=True)))


def test_later_sections_know_the_ceilings_that_the_first_one_measured() -> None:
    def run(device: torch.device, _budget: Budget, rows: Sequence[GpuRow]) -> Iterator[GpuRow]:
        gpu = ceilings(rows, device)
        yield row("found", also={"bandwidth": gpu.bandwidth, "flops": gpu.flops})

    first = run_of(row(COPY, ours=4100.0), row(PRODUCT, ours=780.0))

    rows = list(measured("cpu", 60, sections=[first, Section("next", 1.0, run)]))

    assert rows[-2].also == {"bandwidth": 4.1e12, "flops": 780e12}


def test_the_main_figures_come_before_the_transfer_and_theirs_before_lesser_ones() -> None:
    sections = {section.name: section for section in planned(is_quick=False)}
    names = list(sections)

    assert names.index("model") < names.index("compiled") < names.index("transfer")
    assert sections["compiled"].seconds == 45
    assert step_name(STEPS[0]) == step_name(MODEL_STEPS[0]) == "prefill 2048"
    assert "decode 128 x 4096" in [step_name(step) for step in STEPS[:2]]
    assert "decode 128 x 4096" in [step_name(step) for step in MODEL_STEPS[:3]]


def test_a_check_says_how_many_cases_are_bad() -> None:
    good, bad = (GpuRow.check("kernel", faults, passed=7) for faults in ([], ["a", "b", "c", "d"]))

    assert (good.ours, good.runs, good.has_failed) == (7, 7, False)
    assert (bad.ours, bad.runs, bad.trouble) == (7, 11, "failed: 4 of 11: a; b; c; ...")


def test_cases_that_were_left_out_are_counted() -> None:
    left = GpuRow.check("kernel", [], passed=7, left_out=4, reason="no reason")
    both = GpuRow.check("kernel", ["a"], passed=7, left_out=4)

    assert (left.ours, left.runs, left.has_failed, left.trouble) == (
        7,
        11,
        False,
        "not run: 4 of 11, no reason",
    )
    assert (both.ours, both.runs, both.trouble) == (7, 12, "failed: 1 of 12: a")


def test_formulas_of_llama_8b() -> None:
    # 8,030,261,248 parameters, of which 65 norms of 4,096 are not counted.
    config = SIZES["llama-8b"].config
    assert weight_bytes(config, 2) == 2 * (8_030_261_248 - 65 * 4096)
    # 131,072 bytes of KV a token. Of the embedding a row for each sequence is read.
    step = Step(num_sequences=128, new_tokens=1, context=4096)
    assert kv_bytes(config, step, 2) == 128 * 4096 * 131_072
    read = weight_bytes(config, 2) - 2 * 128_256 * 4096 + 2 * 128 * 4096
    assert decode_bytes(config, step, 2) == read + 128 * 4096 * 131_072

    two = Step(num_sequences=2, new_tokens=1024, context=1024)
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336
    of_one = 32 * (2 * layer * 1024 + 2 * 4096 * 1024**2) + 2 * 128_256 * 4096
    assert prefill_flops(config, two) == 2 * of_one


def test_an_accelerator_is_part_of_the_machines_name() -> None:
    assert hardware("NVIDIA H200").startswith(f"nvidia-h200-{os.cpu_count()}x-")
    assert hardware().startswith(f"{os.cpu_count()}x-")
