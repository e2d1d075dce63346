"""Entry point of `python -m benchmarks.clients`, which `make clients` runs.

Installs each client in an environment of its own, starts a cluster, runs every load of every client and looks
at what its report says. Exit code 1 if anything is not as it was asked for, or a client cannot be installed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.clients.aiperf import AIPERF
from benchmarks.clients.cluster import cluster
from benchmarks.clients.environments import NotInstalledError, prepare
from benchmarks.clients.guidellm import GUIDELLM
from benchmarks.clients.processes import ProgramError
from benchmarks.clients.record import Record
from benchmarks.clients.runner import run_all
from benchmarks.clients.served import Trace
from benchmarks.clients.vllm_bench import VLLM_BENCH
from benchmarks.report import RESULTS

CLIENTS = {client.name: client for client in (AIPERF, GUIDELLM, VLLM_BENCH)}
FOLDER = Path("build/clients")
MODEL = "smollm2-135m-instruct"


def main() -> int:
    arguments = _arguments()
    record = Record(arguments.model)
    programs = {}
    for name in arguments.clients or CLIENTS:
        print(f"{name}: environment", flush=True)
        try:
            programs[name] = prepare(CLIENTS[name], arguments.folder.resolve())
        except NotInstalledError as error:
            record.add_missing(CLIENTS[name], str(error))
    if not arguments.install_only and programs:
        _measure(record, programs, arguments.model)
    if not arguments.install_only:
        print(f"kept as {record.publish(arguments.json, arguments.results)}")
    for complaint in record.complaints:
        print(complaint, file=sys.stderr)
    return 1 if record.complaints else 0


def _measure(record: Record, programs: dict[str, Path], model: str) -> None:
    with tempfile.TemporaryDirectory(prefix="baton-clients-") as name:
        folder = Path(name)
        trace = folder / "trace.jsonl"
        try:
            with cluster(model, folder, trace) as target:
                for client, place in programs.items():
                    run_all(
                        CLIENTS[client],
                        place,
                        target=target,
                        trace=Trace(trace),
                        folder=folder,
                        record=record,
                    )
        except ProgramError as error:
            record.complaints.append(f"cluster: {error}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    # argparse looks for the empty list, which stands for none named, among the choices.
    parser.add_argument("clients", nargs="*", choices=[[], *CLIENTS], help="which; all when none is named")
    parser.add_argument("--install-only", action="store_true", help="make the environments, run nothing")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the environments are")
    parser.add_argument("--model", default=MODEL, help="a model of the catalogue")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the dated copy")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
