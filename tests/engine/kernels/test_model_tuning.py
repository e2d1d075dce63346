"""What is measured for a model: its kernels' calls, and contests whose sides compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton import knobs

from baton.errors import ConfigError
from baton.model_config import ModelConfig
from engine.kernels import model_tuning
from engine.kernels.__main__ import main
from engine.kernels.choices import UNMEASURED, Choices
from engine.kernels.contests import EMBED_RMS_NORM_QKV, PREFILL_ATTENTION, model_contests
from engine.kernels.model_launches import Step, launch_makers
from engine.kernels.model_tuning import keep_programs, model_steps, tune_model
from engine.kv_cache import CacheShape

CPU = torch.device("cpu")
CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
)
CACHE = CacheShape(num_blocks=1, num_layers=2, num_kv_heads=2, block_size=16, head_dim=8, dtype=torch.float32)
STEPS = (
    Step(num_sequences=1, new_tokens=20, context=40),
    Step(num_sequences=2, new_tokens=1, context=40),
)
KERNELS = {"embed_rms_norm_qkv", "add_rms_norm", "rope_store_kv", "prefill_attention", "paged_attention",
           "gated_activation", "block_copy"}  # fmt: skip


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


def tuned(timer: Callable[[Callable[[], object]], float]) -> Choices:
    return tune_model(CONFIG, CACHE, torch.float32, CPU, timer=timer, steps=STEPS)


@pytest.mark.parametrize("op", [EMBED_RMS_NORM_QKV, PREFILL_ATTENTION])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_both_sides_of_a_contest_compute_the_same(op: str, layout: str) -> None:
    torch.manual_seed(0)
    contests = model_contests(CONFIG, replace(CACHE, layout=layout), torch.float32, CPU)
    (contest,) = [contest for contest in contests if contest.op == op]

    kernel, vendor = contest.sides(19, UNMEASURED)

    torch.testing.assert_close(kernel(), vendor(), rtol=1e-4, atol=1e-4)


def test_every_kernel_of_a_model_is_measured_once_and_shown(
    cache_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[float] = []

    def timer(_run: Callable[[], object]) -> float:
        measured.append(1e-6)
        return 1e-6

    choices = tuned(timer)

    assert {name for name, _ in choices.measured} == KERNELS
    assert choices.crossings == {EMBED_RMS_NORM_QKV: 1, PREFILL_ATTENTION: 1}
    num_measured = len(measured)
    assert tuned(timer) == choices
    assert len(measured) == num_measured

    main(["--device", "cpu"])
    shown = capsys.readouterr().out
    assert "add_rms_norm  width=48 dtype=float32 delta=float32 delta_norm=0  (3 declared)" in shown
    assert "  *        1.0 us  warps=4 stages=1" in shown
    assert "the kernel is used from 1 token on" in shown

    (file,) = cache_folder.glob("*.json")
    main(["--file", str(file), "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())


def test_each_window_has_prompts_and_decode_batches_beyond_it() -> None:
    layers = (CONFIG.layers[0], replace(CONFIG.layers[0], window=4095), replace(CONFIG.layers[0], window=100))
    windowed = replace(CONFIG, layers=layers, max_model_len=10_000)

    steps = model_steps(windowed)

    assert model_steps(CONFIG) == model_tuning.STEPS
    assert steps[: len(model_tuning.STEPS)] == model_tuning.STEPS
    for window, following in ((100, 4095), (4095, 100_000)):
        beyond = [step for step in steps[len(model_tuning.STEPS) :] if window < step.context < following]
        assert [step.new_tokens for step in beyond] == [2048, 1024, 256, 64, 16, 1]
        assert all(step.context > step.new_tokens for step in beyond)
    # No sequence outgrows a window as long as the model.
    assert model_steps(replace(windowed, max_model_len=4095)) == steps[: len(model_tuning.STEPS) + 6]


def test_measuring_takes_no_model_sized_embedding() -> None:
    large = replace(CONFIG, vocab_size=1_000_000)
    step = Step(num_sequences=1, new_tokens=20, context=20)

    def rows_on(device: str) -> int:
        cache = torch.zeros(2, 1, 2, 2, 16, 8, device=device)
        (launch,) = launch_makers(large, step, cache, torch.float32)[0]()
        return len(launch.arguments["embedding_ptr"])

    assert rows_on("cpu") == 4096
    assert rows_on("meta") == 1_000_000


def test_programs_are_kept_beside_measurements_unless_a_setting_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    store = model_tuning.store_of(CPU)
    assert store is not None
    with knobs.cache.scope():
        keep_programs(store)
        assert knobs.cache.dir == str(tmp_path / "kernels" / "programs")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    with knobs.cache.scope():
        keep_programs(store)
        assert knobs.cache.dir == "/elsewhere"


def test_a_gpu_gets_its_memory_back_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []

    def fail(*_: object, **__: object) -> None:
        raise ConfigError("no memory", field="kernels")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(model_tuning, "store_of", lambda _: None)
    monkeypatch.setattr(model_tuning, "tune", fail)

    with pytest.raises(ConfigError, match="no memory"):
        tune_model(CONFIG, CACHE, torch.bfloat16, torch.device("cuda"), timer=lambda _: 0.0)

    assert emptied == [True]


def test_the_table_marks_what_is_chosen_and_where_the_vendor_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"constants": {"BLOCK": 64}, "num_stages": 2}
    times = [{**config, "num_warps": 4, "seconds": 3e-6}, {**config, "num_warps": 8, "seconds": 2.5e-6}]
    rungs = [
        {"tokens": 1, "kernel_s": 2e-6, "vendor_s": 1e-6},
        {"tokens": 2, "kernel_s": 3e-6, "vendor_s": 4e-6},
    ]
    content = {
        "environment": {"device": "H200"},
        "kernels": [{"kernel": "k", "shape": {"width": 7}, "declared": 3, "times": times}],
        "crossings": [
            {"op": "o", "shape": {"width": 7}, "rungs": rungs},
            {"op": "p", "shape": {}, "rungs": rungs[:1]},
        ],
    }
    file = tmp_path / "there.json"
    file.write_text(json.dumps(content))

    main(["--file", str(file)])

    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["device", "H200"],
        [],
        ["k", "width=7", "(3", "declared,", "1", "dropped)"],
        ["3.0", "us", "BLOCK=64", "warps=4", "stages=2"],
        ["*", "2.5", "us", "BLOCK=64", "warps=8", "stages=2"],
        ["o", "width=7", "(the", "kernel", "is", "used", "from", "2", "tokens", "on)"],
        ["1", "tokens", "kernel", "2.0", "us", "vendor", "1.0", "us"],
        ["*", "2", "tokens", "kernel", "3.0", "us", "vendor", "4.0", "us"],
        ["p", "(the", "vendor's", "operators", "are", "used)"],
        ["1", "tokens", "kernel", "2.0", "us", "vendor", "1.0", "us"],
    ]


def test_where_nothing_was_measured_the_way_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --model"):
        main(["--device", "cpu"])
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"other\.json cannot be read"):
        main(["--file", str(tmp_path / "other.json")])
