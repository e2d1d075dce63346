"""How the GPU's benchmark measures: what one failure costs, and who is measured when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.errors import InternalError
from benchmarks.on_gpu import compile as compiling
from benchmarks.on_gpu import kernels, peers, timer
from benchmarks.on_gpu.facts import COPY, PRODUCT
from benchmarks.on_gpu.model import Bench
from benchmarks.on_gpu.section import Budget, GpuRow
from benchmarks.on_gpu.shapes import model_size
from benchmarks.on_gpu.timer import Times, wall_times
from benchmarks.on_gpu.transfer_model import known_choices, make_runner
from engine.kernels import tuning
from engine.kernels.contests import model_contests
from engine.kernels.cost import Gpu
from engine.kernels.measurements import Ladder, Measurements, Rung
from engine.kernels.model_launches import Step
from engine.kernels.model_tuning import store_of

torch.set_num_threads(1)

CPU = torch.device("cpu")
COPY_AND_PRODUCT = (
    GpuRow(metric=COPY, unit="GB/s", ours=60.0, runs=1),
    GpuRow(metric=PRODUCT, unit="TFLOP/s", ours=0.1, runs=1),
)
H200 = Gpu(name="NVIDIA H200", flops=800e12, bandwidth=4.2e12)


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache of measurements."""
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))


@pytest.fixture
def norms_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step, the calls of one kernel."""
    launches = kernels._launches

    def chosen(*arguments: Any) -> Any:
        return (launch for launch in launches(*arguments) if launch.kernel.name == "add_rms_norm")

    monkeypatch.setattr(kernels, "_launches", chosen)


def test_a_kernel_that_cannot_be_measured_costs_the_tuning_alone(
    monkeypatch: pytest.MonkeyPatch, norms_alone: None
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no configuration runs")

    monkeypatch.setattr(tuning, "_race", fail)
    with pytest.raises(InternalError, match="no configuration"):
        list(kernels.tuning(CPU, Budget.of(60), ()))

    rows = list(kernels.kernels(CPU, Budget.of(60), ()))

    assert [row.metric for row in rows] == ["add_rms_norm, prefill 9", "add_rms_norm, decode 2 x 5"]
    assert [row.trouble for row in rows] == ["", ""]


def test_what_was_measured_is_used_crossings_too() -> None:
    size = model_size(CPU)
    store = store_of(CPU)
    assert store is not None
    shape = make_runner(size, 8, CPU).cache.shape
    first, _ = model_contests(size.config, shape, size.dtype, CPU)
    rung = Rung(num_tokens=8, kernel_s=1.0, vendor_s=2.0)
    store.write(Measurements().with_ladder(Ladder(op=first.op, shape=first.shape, rungs=(rung,))))

    assert known_choices(size, CPU).crossings == {first.op: 8}


@pytest.mark.parametrize("error", [ValueError("of Triton"), type("TritonError", (Exception,), {})("of 3.6")])
def test_one_kernel_that_raises_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, norms_alone: None, error: Exception
) -> None:
    times = kernels.call_times
    errors = [error]

    def failing_once(*arguments: Any) -> Times:
        if errors:
            raise errors.pop()
        return times(*arguments)

    monkeypatch.setattr(kernels, "call_times", failing_once)

    first, second = kernels.kernels(CPU, Budget.of(60), COPY_AND_PRODUCT)

    assert first.trouble == f"failed: {type(error).__name__}: {error}"
    assert (second.metric, second.trouble) == ("add_rms_norm, decode 2 x 5", "")


def test_a_ruined_device_ends_the_section(monkeypatch: pytest.MonkeyPatch, norms_alone: None) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(timer, "synchronize", fail)
    monkeypatch.setattr(kernels, "call_times", fail)

    rows = list(kernels.kernels(CPU, Budget.of(60), COPY_AND_PRODUCT))

    assert [row.metric for row in rows] == ["kernels, prefill 9", "kernels, the rest"]
    assert [row.has_failed for row in rows] == [True, False]
    assert rows[1].trouble == "not run: the device was ruined before"


def test_a_peer_that_fails_leaves_our_time(monkeypatch: pytest.MonkeyPatch, norms_alone: None) -> None:
    def no_compiler() -> None:
        raise NotImplementedError("no compiler")

    def made(*_: object) -> dict[str, Callable[[], object]]:
        return {"eager": lambda: None, "SDPA": no_compiler}

    monkeypatch.setattr(kernels, "peers_of", made)

    first, trouble, *_ = kernels.kernels(CPU, Budget.of(60), COPY_AND_PRODUCT)

    assert first.ours is not None
    assert first.peer_name == "eager"
    assert trouble.metric == "add_rms_norm, prefill 9: SDPA"
    assert trouble.trouble == "not run: NotImplementedError: no compiler"


def test_a_time_that_cannot_be_is_a_row(monkeypatch: pytest.MonkeyPatch, norms_alone: None) -> None:
    monkeypatch.setattr(kernels, "call_times", lambda *_: Times((1e-12,)))
    monkeypatch.setattr(kernels, "_FLUSHED_BYTES", 1.0)

    row, doubt, *_ = kernels.kernels(CPU, Budget.of(60), COPY_AND_PRODUCT)

    assert row.also["share"] > 1
    assert doubt.in_table
    assert doubt.note == f"faster than the ceiling: {row.also['share']:.3g}"


def test_sides_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "synchronize", lambda _: None)
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}

    times = wall_times(calls, torch.device("cuda"))

    # A run of each before, and ten that count: the most that short ones get.
    assert order == list("ab") + list("abba") * 5
    assert {name: each.runs for name, each in times.items()} == {"a": 10, "b": 10}


def test_times_have_a_median_and_a_spread() -> None:
    times = Times((3.0, 1.0, 8.0))

    assert (times.median, times.runs) == (3.0, 3)
    assert times.spread() == {"min ms": 1000.0, "max ms": 8000.0}


def test_a_step_has_the_peer_that_its_number_is_from() -> None:
    bench = Bench(make_runner(model_size(CPU), 16, CPU), CPU, H200)
    config = bench._runner.model.config
    step = Step(num_sequences=128, new_tokens=1, context=4096)
    per_layer = config.hidden_size * (3 * 16 + 16 + 3 * config.intermediate_size)
    read = 2 * per_layer + (97 + 128) * config.hidden_size + 2 * 2 * 16 * 128 * 4096

    assert bench._anchor(Step(num_sequences=1, new_tokens=2048, context=2048)) == ("tables", 0.0419)
    name, seconds = bench._anchor(step) or ("", 0.0)
    assert name == "83% of bandwidth"
    assert seconds == pytest.approx(4 * read / (0.83 * 4.8e12))
    assert bench._anchor(Step(num_sequences=8, new_tokens=1, context=1024)) is None


def test_the_compiler_is_not_told_that_every_size_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, object]] = []
    monkeypatch.setattr(peers, "_programs", {})
    monkeypatch.setattr(torch, "compile", lambda function, **options: (told.append(options), function)[1])

    peers._compiled(len)

    assert told == [{}]


def test_slow_programs_are_compiled_first() -> None:
    names = ("block_copy", "paged_attention", "add_rms_norm", "prefill_attention")
    work: Any = [(SimpleNamespace(kernel=SimpleNamespace(name=name)), None, True) for name in names]

    assert compiling.slow_first(range(4), work) == [3, 1, 0, 2]


def test_what_the_checks_and_the_small_model_run_in_fp32_is_compiled_ahead() -> None:
    work = compiling.all_work(is_tiny=False)

    attention = {
        (launch.arguments["q_ptr"].dtype, launch.constants["HEAD_DIM"])
        for launch, _, _ in work
        if launch.kernel.name == "prefill_attention"
    }

    # Heads of Llama-3.1-8B, and of the transfer's model.
    assert {(torch.float32, 128), (torch.float32, 64)} <= attention


@pytest.mark.parametrize("has_launchers", [True, False])
def test_a_launcher_is_built_where_each_signature_has_one(
    monkeypatch: pytest.MonkeyPatch, has_launchers: bool
) -> None:
    built: list[tuple[object, object]] = []
    nvidia = SimpleNamespace(CudaLauncher=lambda source, metadata: built.append((source, metadata)))
    if has_launchers:
        nvidia.make_launcher = None
    monkeypatch.setattr(compiling, "nvidia", nvidia)
    launch: Any = SimpleNamespace(source=lambda *_: ("source", {}))

    compiling.build_launcher(
        launch, config=None, target=SimpleNamespace(backend="cuda"), program=SimpleNamespace(metadata="its")
    )

    assert built == ([("source", "its")] if has_launchers else [])
