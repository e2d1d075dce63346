"""`baton plan`: how many prefill and decode workers a load needs, by formula."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from baton.bench.trace_file import read_trace
from baton.cli.options import AsJson
from baton.cli.whole_table import print_whole
from baton.errors import ConfigError
from baton.model_config import ModelConfig
from baton.models import ModelDir
from baton.plan.costs import ModelCosts
from baton.plan.demand import Demand, Objectives
from baton.plan.planner import Plan, Planner, break_even
from baton.plan.profile import CASES, SHIPPED, DeviceProfile

EXPECTED = CASES.index("expected")


def plan(
    *,
    model: Annotated[str, typer.Option(help="A pulled model, a model folder, or a config.json.")],
    device: Annotated[str, typer.Option(help="A device of the profiles, as h100-80gb or cpu-2core.")],
    profile: Annotated[
        Path, typer.Option(help="TOML file with profiles of devices.", show_default="Baton's")
    ] = SHIPPED,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second.", show_default="the trace's")
    ] = None,
    prompt: Annotated[float | None, typer.Option(min=1, help="Tokens of the median prompt.")] = None,
    prompt_p90: Annotated[
        float | None,
        typer.Option(min=1, help="Tokens that nine prompts of ten stay below.", show_default="--prompt"),
    ] = None,
    output: Annotated[float | None, typer.Option(min=1, help="Mean tokens of an answer.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Lengths and rate of a trace file instead, as `baton bench` reads.")
    ] = None,
    ttft_ms: Annotated[float, typer.Option(help="First token wanted within.")] = 1000.0,
    itl_ms: Annotated[float, typer.Option(help="Gap between tokens wanted.")] = 50.0,
    share: Annotated[float, typer.Option(help="Share of first tokens that have to come in time.")] = 0.95,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the formulas with their numbers.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say how many prefill and decode workers a load needs, and when the split pays.

    By formula, for three cases of what the device reaches; docs/planning.md says which formulas, and how far
    they were from what was measured. Exit code 2: an objective cannot be met, or a value is wrong.
    """
    config = _model_config(model)
    costs = ModelCosts.of(config)
    chosen = DeviceProfile.of(device, profile)
    demand = _demand(rate=rate, prompt=prompt, prompt_p90=prompt_p90, output=output, trace=trace)
    if demand.mean_prompt + demand.output > config.max_model_len:
        raise ConfigError(
            f"prompts of {demand.mean_prompt:.0f} tokens in the mean and answers of {demand.output:g} are "
            f"more than the {config.max_model_len} tokens of the model's context; plan for shorter ones",
            field="prompt",
        )
    objectives = Objectives(ttft_s=ttft_ms / 1000, itl_s=itl_ms / 1000, share=share)
    plans = {name: Planner(costs, chosen, demand, objectives, case).plan() for case, name in enumerate(CASES)}
    pays_from = break_even(costs, chosen, demand, objectives)
    if as_json:
        shown = {name: asdict(found) for name, found in plans.items()}
        given = {"rate": demand.rate, "mean_prompt": demand.mean_prompt, "output": demand.output}
        typer.echo(json.dumps({"demand": given, "plans": shown, "break_even_prompt": pays_from}))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    print_whole(console, _table(plans))
    console.print(_verdict(plans["expected"], pays_from))
    if explain:
        for line in _explained(costs, chosen, demand, objectives):
            console.print(line)


def _model_config(model: str) -> ModelConfig:
    path = Path(model)
    if path.is_file():
        try:
            return ModelConfig.from_hf(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as a config.json: {error}", field="model") from None
    return ModelDir.open(model).model_config


def _demand(
    *,
    rate: float | None,
    prompt: float | None,
    prompt_p90: float | None,
    output: float | None,
    trace: Path | None,
) -> Demand:
    if trace is not None:
        if prompt is not None or prompt_p90 is not None or output is not None:
            raise ConfigError(
                "--trace has the lengths; leave out --prompt, --prompt-p90 and --output", field="trace"
            )
        try:
            return Demand.of_trace(read_trace(trace), rate)
        except (OSError, ValueError) as error:
            raise ConfigError(f"trace: {error}", field="trace") from None
    missing = [
        f"--{name}"
        for name, value in (("rate", rate), ("prompt", prompt), ("output", output))
        if value is None
    ]
    if missing or rate is None or prompt is None or output is None:
        raise ConfigError(
            f"{', '.join(missing)} missing; give them, or a --trace", field=missing[0].strip("-")
        )
    return Demand.of_lengths(rate, median=prompt, p90=prompt_p90, output=output)


def _table(plans: dict[str, Plan]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("if the device reaches")
    for name in plans:
        table.add_column(
            {"low": "little", "expected": "what is expected", "high": "much"}[name], justify="right"
        )

    def row(text: str, shown: Any) -> None:
        table.add_row(text, *(shown(found) for found in plans.values()))

    row("prefill workers", lambda p: str(p.prefill))
    row("decode workers", lambda p: str(p.decode))
    row("colocated instead", lambda p: "none would do" if p.colocated is None else str(p.colocated))
    row("mean TTFT", lambda p: f"{1000 * p.ttft_mean_s:.0f} ms")
    row("first tokens in time", lambda p: f"{p.ttft_share:.1%}")
    row("ITL", lambda p: f"{1000 * p.itl_s:.1f} ms")
    row("answers at once per decode worker", lambda p: f"{p.answers_per_worker:.1f}")
    row("their KV, of the room for it", lambda p: f"{p.kv_gb:.1f} of {p.kv_room_gb:.1f} GB")
    row(
        "link a prefill worker fills",
        lambda p: f"{p.link_gbps:.1f} Gbit/s" + ("" if p.is_hidden else ", not hidden"),
    )
    return table


def _verdict(found: Plan, pays_from: float | None) -> str:
    split = found.prefill + found.decode
    if found.colocated is None:
        words = f"Split, {split} devices; colocated ones would not keep the objectives."
    elif split <= found.colocated:
        words = f"Split, {split} devices; colocated ones would be {found.colocated}."
    else:
        words = f'Colocated (placement = "colocated"): {found.colocated}; the split would take {split}.'
    if found.colocated is None or split <= found.colocated:
        return words
    if pays_from is None:
        return f"{words} So it does for longer prompts, up to sixteen times, or as far as objectives allow."
    return f"{words} From prompts of about {pays_from:.0f} tokens on the split needs no more devices."


def _explained(
    costs: ModelCosts, profile: DeviceProfile, demand: Demand, objectives: Objectives
) -> list[str]:
    planner = Planner(costs, profile, demand, objectives, EXPECTED)
    length, found = demand.mean_prompt, planner.plan()
    itl_ms = 1000 * found.itl_s
    flops = profile.peak_tflops * profile.prefill[EXPECTED]
    rate = profile.memory_gbps * profile.decode[EXPECTED]
    step = costs.decode_bytes(found.answers_per_worker, length + demand.output / 2)
    return [
        "",
        f"prefill of {length:.0f} tokens: {costs.prefill_flops(length) / 1e12:.3g} TFLOP / "
        f"({profile.peak_tflops:g} * {profile.prefill[EXPECTED]:g} = {flops:.3g} TFLOP/s) = "
        f"{1000 * planner.prefill_s(length):.1f} ms",
        f"load on prefill: {demand.rate:g}/s * mean service, over {found.prefill} workers; waits by Erlang C "
        "and Allen-Cunneen",
        f"decode step of {found.answers_per_worker:.1f} answers: {step / 1e9:.3g} GB / "
        f"({profile.memory_gbps:g} * {profile.decode[EXPECTED]:g} = {rate:.4g} GB/s) = {itl_ms:.1f} ms",
        f"answers at once: {demand.rate:g}/s * {demand.output:g} tokens * {itl_ms:.1f} ms "
        f"/ {found.decode} workers",
        f"KV: {costs.kv_bytes_per_token / 1024:.1f} KiB per token; "
        f"weights: {costs.stored_bytes / 1e9:.2f} GB",
    ]
