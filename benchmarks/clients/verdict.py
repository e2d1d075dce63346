"""Whether a client got what it asked for: its report against what was asked and what the cluster did.

Owns no process; a complaint is a sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.clients.runs import Report, Run
from benchmarks.clients.served import Served

# More of the same say nothing new.
SHOWN_ERRORS = 3


def complaints(run: Run, report: Report, served: Sequence[Served]) -> list[str]:
    """What is wrong; empty when nothing is."""
    return [*_failures(run, report), *_figures(run, report), *_differences(run, report, served)]


def _failures(run: Run, report: Report) -> list[str]:
    found = [f"failed: {error}" for error in report.errors[:SHOWN_ERRORS]]
    if not report.answers:
        found.append("no request was answered")
    if run.num_requests is not None:
        ended = len(report.answers) + report.num_cancelled
        if ended != run.num_requests:
            found.append(f"{ended} of {run.num_requests} requests were answered or given up")
    if run.cancels and not report.num_cancelled:
        found.append("no request was given up")
    if not run.cancels and report.num_cancelled:
        found.append(f"{report.num_cancelled} requests were given up")
    return found


def _figures(run: Run, report: Report) -> list[str]:
    found = []
    lengths = sorted({answer.num_output_tokens for answer in report.answers} - {run.output_tokens})
    if lengths:
        found.append(f"answers have {lengths} tokens; {run.output_tokens} were asked for")
    if any(answer.ttft_ms <= 0 for answer in report.answers):
        found.append("an answer has no time to its first token")
    if any(answer.itl_ms <= 0 for answer in report.answers):
        found.append("an answer has no time between its tokens")
    return found


def _differences(run: Run, report: Report, served: Sequence[Served]) -> list[str]:
    """Prompts and answers must be as long as the cluster counted them, request by request."""
    told = Counter((answer.num_prompt_tokens, answer.num_output_tokens) for answer in report.answers)
    counted = Counter((request.num_prompt_tokens, request.num_output_tokens) for request in served)
    found = [
        f"{number} answers of {output} tokens to {prompt} are not the cluster's"
        for (prompt, output), number in (told - counted).items()
    ]
    others = counted - told
    if others.total() > report.num_cancelled:
        found.append(f"the cluster ended {len(served)} requests, {others.total()} without an answer")
    # A request that is given up must not be computed to its end.
    whole = sum(number for (_, output), number in others.items() if output >= run.output_tokens)
    if whole:
        found.append(f"{whole} requests that were given up went on to their end")
    return found
