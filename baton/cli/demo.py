"""`baton demo`: a whole cluster, three answers at once, and where their time went."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from baton.answer import Summary
from baton.cli.cluster_console import ClusterConsole
from baton.cli.demo_streams import DemoStreams
from baton.cli.demo_texts import PROMPTS
from baton.cli.interrupts import Interrupts
from baton.cli.pull import PullProgress
from baton.cli.text_input import open_stdout
from baton.cli.up import exit_now, print_endpoints
from baton.client import AsyncClient
from baton.cluster.config import ClusterConfig
from baton.cluster.defaults import DEFAULT_MODEL
from baton.errors import ModelError
from baton.models import ModelDir
from baton.pull import pull as pull_model

MAX_TOKENS = 64
ASK_TIMEOUT_S = 30.0
_KV_CACHE_BYTES = 1 << 28


def demo(
    model: Annotated[str, typer.Option(help="A model of the catalogue, or a folder.")] = DEFAULT_MODEL,
    dtype: Annotated[
        str | None, typer.Option(help="auto, bfloat16, float16 or float32.", show_default="the checkpoint's")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Keep the cluster running without asking.")] = False,
    no_input: Annotated[bool, typer.Option("--no-input", help="Do not ask; end after the answers.")] = False,
) -> None:
    """Show the whole path: pull a model, start a cluster, stream three answers at once.

    Everything runs on this machine, on free ports, and ends with the command. On a terminal
    it asks whether to stay up.
    """
    open_stdout()
    console = ClusterConsole(Console(stderr=True))
    _pull_if_missing(model, console)
    # Free ports, so that the demo never meets a cluster that is already running.
    config = ClusterConfig(
        model=model,
        dtype=dtype,
        kv_cache_bytes=_KV_CACHE_BYTES,
        port=0,
        admin_port=0,
        control_port=0,
        http_port=0,
        dashboard_port=0,
    )
    may_ask = sys.stdin.isatty() and sys.stdout.isatty() and not no_input
    interrupts = Interrupts(
        on_first=lambda: console("stopping; Ctrl-C again ends it at once"), on_second=exit_now
    )
    asyncio.run(interrupts.run(_demo(config, console, stay=yes, may_ask=may_ask)))
    console.say("stopped; nothing is left running")


async def _demo(config: ClusterConfig, console: ClusterConsole, *, stay: bool, may_ask: bool) -> None:
    cluster = await console.start(config)
    async with cluster:
        out = Console(highlight=False)
        summaries = await _answer_all(cluster.address, out)
        out.print(timings_table(summaries))
        out.print(f"prefill on {_names(summaries, 'prefill')}, decode on {_names(summaries, 'decode')}")
        out.print(
            f"Ray dashboard: {cluster.dashboard_url} (`ray get-auth-token` prints its token)", soft_wrap=True
        )
        if stay or (may_ask and await _wants_to_stay()):
            print_endpoints(cluster, console)
            console.say("Ctrl-C stops it")
            await cluster.run()


def _pull_if_missing(model: str, console: ClusterConsole) -> None:
    try:
        ModelDir.open(model)
    except ModelError:
        console.say(f"pulling {model}")
        with PullProgress(console.console) as progress:
            pull_model(model, progress.show)


async def _answer_all(address: str, out: Console) -> list[Summary]:
    """Asks all questions at the same time and shows the answers; returns how each one went."""
    async with await AsyncClient.connect(address, tls=False) as client:
        with DemoStreams([label for label, _ in PROMPTS], out) as streams:
            tasks = [
                asyncio.create_task(_answer(client, streams, index, text))
                for index, (_, text) in enumerate(PROMPTS)
            ]
            # Each one ends, well or not, before the first error is raised.
            await asyncio.wait(tasks)
    return [task.result() for task in tasks]


async def _answer(client: AsyncClient, streams: DemoStreams, index: int, text: str) -> Summary:
    generation = client.generate(
        messages=[{"role": "user", "content": text}], max_tokens=MAX_TOKENS, temperature=0.0
    )
    async for chunk in generation:
        streams.add(index, chunk.text)
    streams.finish(index)
    return generation.summary


def timings_table(summaries: list[Summary]) -> Table:
    """One row per request, narrow enough for 80 columns; times in milliseconds.

    "tail" is the part of the transfer after the first token.
    """
    table = Table(box=box.SIMPLE_HEAD, title="times in ms", title_justify="left", padding=0)
    columns = "bucket prompt queue reserve prefill transfer tail MB TTFT ITL output"
    for title in columns.split():
        table.add_column(title, justify="right", no_wrap=True)
    for summary in summaries:
        timings = summary.timings
        table.add_row(
            timings.bucket,
            str(summary.num_prompt_tokens),
            f"{timings.queue_ms:.1f}",
            f"{timings.reserve_ms:.1f}",
            f"{timings.prefill_ms:.0f}",
            f"{timings.transfer_ms:.0f}",
            f"{timings.transfer_tail_ms:.0f}",
            f"{timings.transfer_bytes / 1e6:.1f}",
            f"{timings.ttft_ms:.0f}",
            f"{timings.itl_ms:.1f}",
            str(summary.num_output_tokens),
        )
    return table


def _names(summaries: list[Summary], role: str) -> str:
    """The workers of one role that took part."""
    names = {getattr(summary.timings, f"{role}_worker") for summary in summaries}
    return ", ".join(sorted(names - {""})) or "none"


async def _wants_to_stay() -> bool:
    """Asks at the terminal; no answer within ASK_TIMEOUT_S means no."""
    sys.stdout.write(f"Keep the cluster running? [y/N] (no in {ASK_TIMEOUT_S:.0f} s) ")
    sys.stdout.flush()
    loop = asyncio.get_running_loop()
    answered = asyncio.Event()
    loop.add_reader(sys.stdin, answered.set)
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            await answered.wait()
        # The terminal hands over whole lines, so this does not wait.
        return sys.stdin.readline().strip().lower() in {"y", "yes"}
    except TimeoutError:
        sys.stdout.write("\n")
        return False
    finally:
        loop.remove_reader(sys.stdin)
