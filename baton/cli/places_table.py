"""The places that were looked at for an attempt, line by line: which was taken, and why not others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from baton.route_explain import AttemptExplain, Candidate

_TITLES = ("place", "cached", "held", "wait", "prefill", "transfer", "ITL", "score ms")


def places_table(attempt: AttemptExplain) -> Iterator[Text]:
    """A line of titles, a line per place, and how many more there were. Times in milliseconds."""
    rows = [_TITLES, *map(_cells, attempt.candidates)]
    widths = [max(len(row[index]) for row in rows if index < len(row)) for index in range(len(_TITLES))]
    yield Text(_line(_TITLES, widths), style="dim")
    for candidate, cells in zip(attempt.candidates, rows[1:], strict=True):
        verdict = "taken" if candidate.chosen else candidate.excluded
        style = "bold" if candidate.chosen else "dim" if candidate.excluded else ""
        yield Text(f"{_line(cells, widths)}  {verdict}".rstrip(), style=style)
    more = attempt.num_candidates - len(attempt.candidates)
    if more > 0:
        yield Text(f"  and {more} more", style="dim")


def _cells(candidate: Candidate) -> tuple[str, ...]:
    """One row; of a place that was excluded before anything was predicted only its name."""
    place = _place(candidate)
    times = (candidate.wait_ms, candidate.prefill_ms, candidate.transfer_ms, candidate.itl_ms)
    all_times = (*times, candidate.score_ms)
    if candidate.excluded and not any(all_times):
        return (place,)
    counts = (str(candidate.num_cached_tokens), str(candidate.num_held_tokens))
    return (place, *counts, *(f"{duration_ms:,.1f}" for duration_ms in all_times))


def _place(candidate: Candidate) -> str:
    if candidate.is_local:
        return f"{candidate.decode_worker} alone"
    # A worker that was excluded by itself was never looked at together with another.
    return " -> ".join(name for name in (candidate.prefill_worker, candidate.decode_worker) if name)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=False))
    return "  ".join(("", first, *rest))
