"""The options of `baton bench`, and the plan that they make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from baton.bench.lengths import Lengths
from baton.bench.prompts import Prompts
from baton.bench.run import Plan
from baton.bench.slo import Slo
from baton.bench.target import Bounds
from baton.bench.trace_file import TraceEntry, read_trace

GivenT = TypeVar("GivenT")
ParsedT = TypeVar("ParsedT")

_LOAD = "Load"
_PROMPTS = "Prompts"
_RESULT = "Results"
NUM_REQUESTS = 100
# Of a warm-up too, which is a closed loop whatever the load.
NUM_CALLERS = 8

Door = Annotated[Literal["grpc", "http"], typer.Option(help="Which of the router's doors.")]
Url = Annotated[
    str, typer.Option(envvar="BATON_URL", help="With --door http: the server, as OpenAI's base_url.")
]
Concurrency = Annotated[
    int,
    typer.Option(min=1, help="Closed loop: callers that each wait for an answer.", rich_help_panel=_LOAD),
]
Rate = Annotated[
    float | None,
    typer.Option(min=0.001, help="Open loop: requests/s on average, Poisson.", rich_help_panel=_LOAD),
]
Trace = Annotated[
    Path | None,
    typer.Option(help="Replay a trace: JSON lines or CSV.", dir_okay=False, rich_help_panel=_LOAD),
]
Speed = Annotated[
    float, typer.Option(min=0.001, help="With --trace: how much faster.", rich_help_panel=_LOAD)
]
Requests = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Requests to measure.",
        show_default=f"{NUM_REQUESTS}, or no limit with --seconds or --trace",
        rich_help_panel=_LOAD,
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(min=0.001, help="Send for so long; what is under way ends.", rich_help_panel=_LOAD),
]
WarmUp = Annotated[int, typer.Option(min=0, help="Requests before, not measured.", rich_help_panel=_LOAD)]
MaxInFlight = Annotated[
    int,
    typer.Option(min=1, help="Open loop, trace: more are not sent, and failed.", rich_help_panel=_LOAD),
]
Deadline = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Longest answer, in seconds.", rich_help_panel=_LOAD)
]
InputTokens = Annotated[
    str,
    typer.Option(help="Length of prompts: 512, 16-127, or a mix: 80:100,20:1500.", rich_help_panel=_PROMPTS),
]
OutputTokens = Annotated[
    str, typer.Option(help="Length of answers, written in the same way.", rich_help_panel=_PROMPTS)
]
SharedPrefix = Annotated[
    int, typer.Option(min=0, help="First tokens that all prompts share.", rich_help_panel=_PROMPTS)
]
TokenIds = Annotated[
    str, typer.Option(help="Token ids that prompts are drawn from.", rich_help_panel=_PROMPTS)
]
Seed = Annotated[
    int, typer.Option(help="Same seed, same requests at the same times.", rich_help_panel=_PROMPTS)
]
Objectives = Annotated[
    str | None,
    typer.Option(
        "--slo",
        help="Objectives of a request, for goodput: ttft=500ms,itl=50ms,e2e=5s.",
        rich_help_panel=_RESULT,
    ),
]
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json", help='Write the figures to a file; "-" is standard output.', rich_help_panel=_RESULT
    ),
]
Details = Annotated[
    bool, typer.Option("--details", help="With --json: every request's times too.", rich_help_panel=_RESULT)
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw a picture, .svg or .png; needs matplotlib.", rich_help_panel=_RESULT),
]


def refuse_unused(source: Callable[[str], Any], given: dict[str, Any]) -> None:
    """Raises typer.BadParameter for an option of the other door, or of the other kind of load.

    source: where an option's value comes from; variables may be set for all commands, and are no request.
    """
    is_open = given["rate"] is not None or given["trace"] is not None
    unused = {
        "url": "is for --door http" if given["door"] == "grpc" else "",
        "address": "is for --door grpc; --door http takes --url" if given["door"] == "http" else "",
        "concurrency": "is for a closed loop, not for --rate or --trace" if is_open else "",
        "speed": "" if given["trace"] is not None else "is for --trace",
        "max_in_flight": "" if is_open else "is for --rate and --trace",
        "details": "" if given["json_file"] is not None else "is for --json",
    }
    for name, why in unused.items():
        found = source(name)
        if why and found is not None and found.name == "COMMANDLINE":
            raise typer.BadParameter(why, param_hint=f"'--{name.replace('_', '-')}'")
    if is_open:
        given["concurrency"] = None


def check_writable(path: Path) -> None:
    """Raises OSError if a file cannot be written there; leaves what is there as it is."""
    is_new = not path.exists()
    with path.open("ab"):
        pass
    if is_new:
        path.unlink()


def read_plan(given: dict[str, Any]) -> Plan:
    """The plan that the options ask for, by their names; typer.BadParameter for what cannot be read."""
    if given["rate"] is not None and given["trace"] is not None:
        raise typer.BadParameter("exclude each other", param_hint="'--rate' / '--trace'")
    trace = () if given["trace"] is None else parsed(_trace, given["trace"], "--trace")
    num_requests = given["requests"]
    if num_requests is None and given["seconds"] is None and not trace:
        num_requests = NUM_REQUESTS
    return Plan(
        prompts=_prompts(given),
        concurrency=given["concurrency"] or NUM_CALLERS,
        rate=given["rate"],
        trace=trace,
        speed=given["speed"],
        num_requests=num_requests,
        seconds=given["seconds"],
        num_warm_up=given["warm_up"],
        bounds=Bounds(max_in_flight=given["max_in_flight"], deadline_s=given["timeout_s"]),
        slo=None if given["slo"] is None else parsed(Slo.parse, given["slo"], "--slo"),
    )


def parsed(parse: Callable[[GivenT], ParsedT], given: GivenT, flag: str) -> ParsedT:
    """What `parse` makes of an option; raises typer.BadParameter where it raises ValueError or OSError."""
    try:
        return parse(given)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint=f"'{flag}'") from None


def _prompts(given: dict[str, Any]) -> Prompts:
    first_id, last_id = parsed(_id_range, given["token_ids"], "--token-ids")
    return Prompts(
        seed=given["seed"],
        input_lengths=parsed(Lengths.parse, given["input_tokens"], "--input-tokens"),
        output_lengths=parsed(Lengths.parse, given["output_tokens"], "--output-tokens"),
        first_id=first_id,
        last_id=last_id,
        shared_prefix=given["shared_prefix"],
    )


def _trace(path: Path) -> tuple[TraceEntry, ...]:
    return tuple(read_trace(path))


def _id_range(text: str) -> tuple[int, int]:
    first, separator, last = text.partition("-")
    if not (separator and first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise ValueError(f"{text!r} is no range of token ids; write 100-1099")
    return int(first), int(last)
