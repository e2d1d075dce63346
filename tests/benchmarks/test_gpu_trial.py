"""What the GPU's checks find: wrong numbers, unwritten ones, and memory that nobody should have written."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.on_gpu import checks, timer
from benchmarks.on_gpu.checks import Tally, all_cases
from benchmarks.on_gpu.section import Budget
from benchmarks.on_gpu.trial import GUARD, Guarded, Trial, TrialCase, compare, config_choices, poison
from engine.kernels.add_rms_norm import KERNEL, add_rms_norm_launch
from engine.kernels.choices import Choices

CPU = torch.device("cpu")
BF16_STEP = 2.0**-7


def test_an_error_of_one_rounding_is_none() -> None:
    expected = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))

    words, error = compare(expected.bfloat16(), expected, step=BF16_STEP)

    assert words == ""
    assert 0 < error < BF16_STEP / 2


def test_one_wrong_element_is_found_and_so_is_a_small_error_of_all() -> None:
    expected = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    one = expected.clone()
    one[3, 5] += 0.1

    assert compare(one, expected, step=BF16_STEP)[0] == "1 elements off, the worst by 0.1"
    assert compare(1.02 * expected, expected, step=BF16_STEP)[0] == "off by 0.02, 0.0078 allowed"
    one[3, 5] = torch.nan
    assert compare(one, expected, step=BF16_STEP)[0] == "not finite, or not written"


@pytest.mark.parametrize("at", [(0, 20), (6, 0), (2, 15), (3, 16 + 20)])
def test_a_write_beside_the_tensor_is_found(at: tuple[int, int]) -> None:
    guarded = Guarded((5, 20), torch.float32, CPU)
    memory = guarded.inner._base
    assert memory is not None
    poison([guarded.inner])
    assert guarded.is_intact()

    memory[at] = GUARD + 1

    assert not guarded.is_intact()
    assert guarded.inner.isnan().all()


def norm_trial(device: torch.device, damage: Callable[[torch.Tensor], object]) -> Trial:
    """damage: of what the kernel has written on a device that there is."""
    hidden, out = torch.ones(3, 20), torch.empty(3, 20)

    def run(choices: Choices) -> None:
        poison([out])
        choices.run(add_rms_norm_launch(hidden, None, torch.ones(20), 0.0, out))
        if device == CPU:
            damage(out)

    return Trial(run=run, outputs=lambda: [out], expected=lambda: [torch.ones(3, 20)])


def norm_case(damage: Callable[[torch.Tensor], object]) -> TrialCase:
    return TrialCase(kernel="add_rms_norm", name="ones", make=partial(norm_trial, damage=damage))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda out: out, ""),
        (lambda out: out[1].fill_(torch.nan), "not finite, or not written"),
        (lambda out: out[2, 7].add_(0.01), "off by 0.0013, 1e-05 allowed"),
    ],
)
def test_every_configuration_is_one_case(damage: Callable[[torch.Tensor], object], words: str) -> None:
    tally = Tally("add_rms_norm", [norm_case(damage)])

    assert tally.add(tally.cases[0], CPU)

    found = tally.row()
    assert found.runs == len(KERNEL.configs)
    assert found.ours == (0 if words else len(KERNEL.configs))
    assert words in found.trouble


def test_a_quick_check_runs_the_first_configuration_alone() -> None:
    tally = Tally("add_rms_norm", [norm_case(lambda out: out)], is_quick=True)

    tally.add(tally.cases[0], CPU)

    assert (tally.row().ours, tally.row().runs) == (1, 1)


def test_a_kernel_that_raises_is_a_fault() -> None:
    def raise_(_out: torch.Tensor) -> None:
        raise RuntimeError("an illegal memory access")

    tally = Tally("add_rms_norm", [norm_case(raise_)])
    tally.add(tally.cases[0], CPU)

    assert "ones, configuration 0: RuntimeError: an illegal memory access" in tally.row().trouble


def test_a_case_that_cannot_be_made_is_a_fault() -> None:
    def make(_device: torch.device) -> Trial:
        raise MemoryError("no room")

    tally = Tally("add_rms_norm", [TrialCase(kernel="add_rms_norm", name="ones", make=make)])
    tally.add(tally.cases[0], CPU)

    assert tally.row().trouble == "failed: 1 of 1: ones: MemoryError: no room"


def test_a_ruined_device_costs_one_kernel_and_its_other_cases_are_no_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damaged: list[torch.Tensor] = []

    def ruin(out: torch.Tensor) -> None:
        damaged.append(out)

    def synchronized(_device: torch.device) -> None:
        if damaged:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(checks, "synchronize", synchronized)
    monkeypatch.setattr(timer, "synchronize", synchronized)
    cases = [norm_case(ruin), norm_case(ruin), replace(norm_case(lambda out: out), kernel="another")]

    bad, good, all_of_them = checks.checks_of(cases, CPU, Budget.of(60), is_quick=True)

    assert (bad.ours, bad.runs) == (0, 2)
    assert bad.trouble.startswith("failed: 1 of 2: ones, configuration 0: RuntimeError: CUDA error")
    assert (good.ours, good.runs, good.trouble) == (1, 1, "")
    assert (all_of_them.ours, all_of_them.runs) == (1, 3)


def test_a_kernel_that_ends_its_process_keeps_what_passed_before() -> None:
    cases = [norm_case(lambda out: out), norm_case(lambda _: os._exit(9))]

    bad, all_of_them = checks.checks_of(cases, CPU, Budget.of(60), is_quick=True)

    assert (bad.ours, bad.runs, bad.trouble) == (1, 2, "failed: its process ended with 9")
    assert (all_of_them.ours, all_of_them.runs) == (1, 2)


def test_cases_without_time_are_counted() -> None:
    cases = [norm_case(lambda out: out), norm_case(lambda out: out)]

    none, all_of_them = checks.checks_of(cases, CPU, Budget.of(0), is_quick=True)

    assert none.trouble == "not run: 2 of 2, no time left"
    assert (all_of_them.ours, all_of_them.runs) == (0, 2)


def test_every_declared_configuration_that_a_shape_takes_is_run() -> None:
    for case in all_cases(is_tiny=False):
        launches = case.launches()
        run = {
            (launch.kernel.name, launch.shape, str(choices.config(launch)))
            for choices in config_choices(launches)
            for launch in launches
        }
        assert run == {
            (launch.kernel.name, launch.shape, str(config))
            for launch in launches
            for config in launch.kernel.configs_for(launch.shape)
        }


def test_the_checks_have_the_awkward_sizes() -> None:
    launches = [launch for case in all_cases(is_tiny=False) for launch in case.launches()]
    attention = [
        launch for launch in launches if launch.kernel.name in ("paged_attention", "prefill_attention")
    ]

    assert {launch.constants["HEAD_DIM"] for launch in attention} == {64, 80, 96, 128, 256}
    assert {launch.constants["BLOCK_SIZE"] for launch in attention} == {16, 32}
    assert {launch.constants["GROUP"] for launch in attention} == {3, 4, 7, 8}
    farthest = max(launch.arguments["cache_ptr"].numel() for launch in attention)
    assert 2 * farthest > 2**32
