"""Everything that takes a GPU, in one go: `python benchmarks/gpu.py`, from a checkout, on a bare machine.

    python benchmarks/gpu.py [--seconds 280] [--sections checks kernels ...] [--json FILE] [--results FOLDER]
    python benchmarks/gpu.py --device cpu --quick      every section's code, kernels interpreted, tiny sizes

Needs torch, triton and numpy, and nothing else; downloads nothing. Checks every kernel on the device,
measures each and a Llama-3.1-8B-shaped model, and moves KV between two processes. benchmarks/README.md says
what the rows mean. Each row is printed and written as it comes; a short table comes last; the exit status is
1 if anything failed. On a CPU, where times mean nothing, it takes what it takes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

if not __package__:
    # Started as a file: its folder would hide packages of the same names.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.on_gpu import bare
from benchmarks.on_gpu.table import Record
from benchmarks.report import RESULTS

_SECONDS, _QUICK_SECONDS = 280.0, 60.0
# What hangs there ends all the same.
_INTERPRETED_SECONDS = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if anything failed."""
    options = _options(arguments)
    if options.device == "cpu":
        # Triton looks at this once, when it is first imported.
        os.environ["TRITON_INTERPRET"] = "1"
    bare.install()
    seconds = options.seconds or _seconds(options.device, is_quick=options.quick)
    record = Record(options.results)
    # A process that has just been killed may still write into it.
    with tempfile.TemporaryDirectory(prefix="baton-gpu-", ignore_cleanup_errors=True) as folder:
        # What is compiled or measured is new every time: a first start is one of the things to measure.
        for name in ("BATON_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            os.environ[name] = str(Path(folder) / name.lower())
        try:
            # It imports torch.
            from benchmarks.on_gpu.plan import measured, planned  # noqa: PLC0415

            sections = planned(is_quick=options.quick)
            record.add(measured(options.device, seconds, options.sections, sections=sections))
        finally:
            # Also of a run that is cut off.
            record.close(options.json, seconds=seconds, quick=options.quick)
    return int(any(row.has_failed for row in record.rows))


def _seconds(device: str, *, is_quick: bool) -> float:
    if device == "cpu":
        return _INTERPRETED_SECONDS
    return _QUICK_SECONDS if is_quick else _SECONDS


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu interprets kernels")
    parser.add_argument("--seconds", type=float, help="that all of it may take; what has no time is not run")
    parser.add_argument(
        "--quick", action="store_true", help="one minute, and of each kernel the first configuration"
    )
    parser.add_argument("--sections", nargs="+", default=[], help="these alone, by name")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the dated copy")
    return parser.parse_args(arguments)


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    # As any other end: what there is is kept, and everything that was started is ended.
    signal.signal(signal.SIGTERM, _exit)
    sys.exit(main())
