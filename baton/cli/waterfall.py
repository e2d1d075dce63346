"""Draws one answer's way through the cluster: a heading, a bar per phase on one scale of time, the places.

Owns the picture. It knows neither where the data comes from nor whether a terminal shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from baton.cli.places_table import places_table
from baton.route_explain import AttemptExplain, RouteExplain

_LABEL_COLUMNS = 18
_MS_COLUMNS = 12
_NOTE_COLUMNS = 36
_MIN_BAR_COLUMNS = 10
# Decoding takes most of most requests' time; beyond this multiple of all that comes before, it is cut off,
# or everything else would share one column.
_CUT = 2.0
_WAITING, _WORKING, _HIDDEN, _FAILED = "wait", "work", "hidden", "failed"
# (with block characters, in ASCII, style)
_MARKS = {
    _WAITING: ("░", ".", "yellow"),
    _WORKING: ("█", "#", "green"),
    _HIDDEN: ("▒", "=", "cyan"),
    _FAILED: ("█", "x", "red"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A bar: what happened between two moments, in milliseconds since the request came."""

    label: str
    start_ms: float
    end_ms: float
    kind: str
    note: str = ""

    @property
    def duration_ms(self) -> float:
        """How long it took, in milliseconds."""
        return max(0.0, self.end_ms - self.start_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One scale for all bars: `columns` characters stand for the time from 0 to end_ms, which is above 0."""

    columns: int
    end_ms: float

    def bar(self, phase: Phase, *, in_ascii: bool) -> Text:
        """The bar in its place, at least one column; what goes on beyond the scale ends in >."""
        last = self.columns - 1
        first = min(last, int(self.columns * phase.start_ms / self.end_ms))
        end = max(first + 1, round(self.columns * phase.end_ms / self.end_ms))
        block, letter, style = _MARKS[phase.kind]
        drawn = (letter if in_ascii else block) * (min(end, self.columns) - first)
        if phase.end_ms > self.end_ms:
            drawn = drawn[:-1] + ">"
        text = Text(" " * first + drawn, style=style)
        text.pad_right(self.columns - len(text))
        return text


def waterfall(explain: RouteExplain, *, width: int, in_ascii: bool = False) -> list[Text]:
    """The picture, line by line.

    width: columns to fill with bars and their notes; a name or a reason that is longer is not cut.
    in_ascii: for outputs that cannot show block characters.
    """
    lines = [Text(line, style="bold" if index == 0 else "") for index, line in enumerate(_heading(explain))]
    phases = [phases_of(attempt, explain) for attempt in explain.attempts]
    every = [phase for attempt in phases for phase in attempt]
    columns = max(_MIN_BAR_COLUMNS, width - _LABEL_COLUMNS - _MS_COLUMNS - _NOTE_COLUMNS)
    scale = Scale(columns=columns, end_ms=_scale_end(every))
    for attempt, own in zip(explain.attempts, phases, strict=True):
        lines += [Text(), Text(_attempt_title(attempt), style="bold"), _ruler(scale)]
        lines += [_row(phase, scale, in_ascii=in_ascii) for phase in own]
        if attempt.candidates:
            lines += [Text(), *places_table(attempt)]
    return lines


def phases_of(attempt: AttemptExplain, explain: RouteExplain) -> list[Phase]:
    """What one attempt did, in order; what it never began is absent, what goes on ends at the report."""
    ended = attempt.ended_at_ms
    until = _or(ended, explain.reported_at_ms or _last_moment(attempt))
    bars = [
        _phase("queue", attempt.queued_at_ms, _or(attempt.placed_at_ms, until), _WAITING),
        _phase("reserve", attempt.placed_at_ms, _or(attempt.reserved_at_ms, until), _WAITING),
        *_prefill(attempt, until),
        *_transfer(attempt, until),
        *_decode(attempt, until),
    ]
    found = [bar for bar in bars if bar is not None]
    is_broken = ended is not None and attempt.outcome not in ("", "OK", "CANCELLED")
    return [*found[:-1], _broken(found[-1])] if is_broken and found else found


def _phase(label: str, start_ms: float | None, end_ms: float, kind: str, note: str = "") -> Phase | None:
    if start_ms is None:
        return None
    return Phase(label=label, start_ms=start_ms, end_ms=max(start_ms, end_ms), kind=kind, note=note)


def _broken(phase: Phase) -> Phase:
    """The phase in which an attempt ended before its time."""
    return Phase(
        label=phase.label, start_ms=phase.start_ms, end_ms=phase.end_ms, kind=_FAILED, note=phase.note
    )


def _prefill(attempt: AttemptExplain, until: float) -> list[Phase | None]:
    """Waiting at the worker, then computing, by the worker's own times."""
    start = attempt.reserved_at_ms
    end = _or(attempt.first_token_at_ms, until)
    if start is None or attempt.prefill is None:
        return [_phase("prefill", start, end, _WORKING)]
    times = attempt.prefill
    began = min(start + times.wait_ms, end)
    steps = f"{times.num_steps} step" + "s" * (times.num_steps != 1)
    note = f"{times.num_computed_tokens} tokens in {steps}, {times.num_cached_tokens} cached"
    return [
        _phase("prefill wait", start, began, _WAITING),
        _phase("prefill compute", began, end, _WORKING, note),
    ]


def _transfer(attempt: AttemptExplain, until: float) -> list[Phase | None]:
    """The part that computation hides, then the tail after the first token."""
    sampled, committed = attempt.first_token_at_ms, attempt.committed_at_ms
    place = attempt.place
    if sampled is None or (place is not None and place.is_local):
        return []
    if committed is None:
        # What an answer of one token would have sent is never sent.
        return [_phase("transfer", sampled, until, _WORKING)] if attempt.outcome != "OK" else []
    if not attempt.transfer_bytes:
        return []
    tail_starts = max(0.0, committed - attempt.transfer_tail_ms)
    starts = max(0.0, committed - max(attempt.transfer_ms, attempt.transfer_tail_ms))
    share = f"{attempt.transfer_hidden_share:.0%} hidden"
    return [
        _phase("transfer hidden", starts, tail_starts, _HIDDEN, f"{share} of {_speed(attempt)}"),
        _phase("transfer tail", tail_starts, committed, _WORKING),
    ]


def _speed(attempt: AttemptExplain) -> str:
    megabytes = attempt.transfer_bytes / 1e6
    if attempt.transfer_ms <= 0:
        return f"{megabytes:.2f} MB"
    return f"{megabytes:.2f} MB, {1000 * megabytes / attempt.transfer_ms:,.0f} MB/s"


def _decode(attempt: AttemptExplain, until: float) -> list[Phase | None]:
    """The wait for the decode worker's own first token, then its tokens."""
    place = attempt.place
    is_local = place is not None and place.is_local
    joined = attempt.first_token_at_ms if is_local else attempt.committed_at_ms
    return [
        _phase("decode queue", joined, _or(attempt.decoding_at_ms, until), _WAITING),
        _phase("decode", attempt.decoding_at_ms, until, _WORKING),
    ]


def _last_moment(attempt: AttemptExplain) -> float:
    moments = (
        attempt.placed_at_ms,
        attempt.reserved_at_ms,
        attempt.first_token_at_ms,
        attempt.committed_at_ms,
        attempt.decoding_at_ms,
    )
    return max(moment for moment in (attempt.queued_at_ms, *moments) if moment is not None)


def _or(moment: float | None, otherwise: float) -> float:
    return otherwise if moment is None else moment


def _scale_end(phases: list[Phase]) -> float:
    end = max((phase.end_ms for phase in phases), default=0.0)
    before = max((phase.end_ms for phase in phases if phase.label != "decode"), default=end)
    return max(min(end, _CUT * before), 1e-3)


def _heading(explain: RouteExplain) -> Iterator[str]:
    state = explain.outcome or "in flight"
    yield f"{explain.request_id}, answer {explain.sample_index}, at {explain.router}: {state}"
    expected = (
        f", {explain.expected_output_tokens} output tokens expected" if explain.expected_output_tokens else ""
    )
    if explain.bucket:
        cached = explain.num_prompt_tokens - explain.num_uncached_tokens
        yield f"bucket {explain.bucket}: {explain.num_prompt_tokens} prompt tokens, {cached} cached{expected}"
    else:
        # Never placed, or placed without a choice, beside another answer to the prompt.
        yield f"{explain.num_prompt_tokens} prompt tokens"
    whose = f"tenant {explain.tenant}, " if explain.tenant else ""
    yield f"{whose}priority {explain.priority}"
    total = "" if explain.ended_at_ms is None else f", total {_ms(explain.ended_at_ms)}"
    regret = f", regret {_ms(explain.regret_ms)}" if explain.regret_ms else ""
    yield f"{_first_token(explain)}{total}{regret}"


def _first_token(explain: RouteExplain) -> str:
    """The TTFT against its objective, in words."""
    objective = f"objective {_ms(explain.ttft_objective_ms)}"
    if explain.first_token_at_ms is not None:
        is_met = explain.first_token_at_ms <= explain.ttft_objective_ms
        return f"TTFT {_ms(explain.first_token_at_ms)} ({objective} {'met' if is_met else 'missed'})"
    waited = _or(explain.ended_at_ms, explain.reported_at_ms)
    has_failed = explain.outcome not in ("", "CANCELLED", "DRAINING")
    is_missed = has_failed or waited > explain.ttft_objective_ms
    return f"no first token{'' if explain.outcome else ' yet'} ({objective}{' missed' if is_missed else ''})"


def _attempt_title(attempt: AttemptExplain) -> str:
    place = attempt.place
    if place is None:
        where = "not placed" if attempt.placed_at_ms is None else "placed"
    elif place.is_local:
        where = f"{place.decode_worker} alone"
    else:
        where = f"{place.prefill_worker} -> {place.decode_worker}"
    reason = f", {attempt.reason}" if attempt.reason else ""
    return f"attempt {attempt.number}: {where}: {attempt.outcome or 'in flight'}{reason}"


def _ruler(scale: Scale) -> Text:
    end = _ms(scale.end_ms)
    return Text(" " * _LABEL_COLUMNS + "0" + end.rjust(scale.columns - 1), style="dim")


def _row(phase: Phase, scale: Scale, *, in_ascii: bool) -> Text:
    row = Text(f"  {phase.label}".ljust(_LABEL_COLUMNS))
    row.append_text(scale.bar(phase, in_ascii=in_ascii))
    row.append(_ms(phase.duration_ms).rjust(_MS_COLUMNS))
    if phase.note:
        row.append(f"  {phase.note}", style="dim")
    row.rstrip()
    return row


def _ms(duration_ms: float) -> str:
    return f"{duration_ms:,.1f} ms"
