"""What the router saw and decided, as JSON lines, for `python -m router.replay`.

Owns the format and its file. It holds no prompt, text, key or name of a caller: prefix keys and tenants are
renumbered in order of appearance, so that the log tells only which requests share what. The reader is
router/offline/recording.py.

A router that starts again appends; each run begins with a "log" record that names the format, its version and
the settings. Every record has "t", seconds since the run began, and "kind". A prefix is a list of runs
[first number, count] of its blocks' numbers. Writing must not stop serving: the file is written with the
first record after FLUSH_RECORDS records or FLUSH_S seconds, without fsync, and after the first error never
again. So a router that is killed loses the last records; a file system that hangs hangs the router.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from baton.errors import ConfigError
from baton.logs import get_logger
from baton.v1 import common_pb2, route_explain_pb2
from router.config import RouterConfig
from router.learning.cost_model import KINDS, CostModel
from router.renumbering import Renumbering

log = get_logger(__name__)

FORMAT = "baton-decisions"
VERSION = 1
FLUSH_RECORDS = 64
FLUSH_S = 1.0
COSTS_INTERVAL_S = 10.0
# What a replay under the product's own policy needs to know of the router.
SETTINGS = ("bucket_edges", "max_wait_s", "max_queue", "placement", "local_max_tokens", "itl_objective_ms")


class DecisionLog:
    """The log of one run of a router; one that was given no path takes everything and writes nothing.

    `now` is always the event loop's time, in seconds; the run begins at the one given here.
    Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: str, *, config: RouterConfig, now: float) -> None:
        self._path = path
        self._began_at = now
        self._flushed_at = now
        self._costs_at = now - COSTS_INTERVAL_S
        self._lines: list[bytes] = []
        self._blocks = Renumbering()
        self._tenants = Renumbering()
        self._num_requests = 0
        self._file = _open(path) if path else None
        settings = {name: getattr(config, name) for name in SETTINGS}
        self._write(now, "log", format=FORMAT, version=VERSION, router=config.name, settings=settings)

    @property
    def is_on(self) -> bool:
        """Whether anything is written; who would compute keys only for this log asks first."""
        return self._file is not None

    def worker_joined(
        self,
        now: float,
        *,
        name: str,
        role: common_pb2.Role.ValueType,
        incarnation: int,
        num_blocks: int,
        block_size: int,
        chunk_tokens: int,
        max_batch_tokens: int,
        mixed_tokens: int = 0,
        max_running: int = 0,
    ) -> None:
        """A worker said what it is. mixed_tokens, max_running: of decode workers."""
        self._write(
            now,
            "worker",
            name=name,
            role=common_pb2.Role.Name(role).removeprefix("ROLE_").lower(),
            incarnation=f"{incarnation:016x}",
            num_blocks=num_blocks,
            block_size=block_size,
            chunk_tokens=chunk_tokens,
            max_batch_tokens=max_batch_tokens,
            mixed_tokens=mixed_tokens,
            max_running=max_running,
        )

    def worker_gone(self, now: float, *, name: str) -> None:
        """A worker is lost or refused."""
        self._write(now, "gone", name=name)

    def request(
        self,
        now: float,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        sample_index: int = 0,
        tenant: str,
        priority: common_pb2.Priority.ValueType,
        ttft_objective_ms: float,
        weight: float = 1.0,
        prefix: Mapping[int, Sequence[bytes]],
    ) -> int:
        """An answer is wanted. Returns its number in this log, which placed() and ended() take.

        weight: its tenant's share.  prefix: keys of the full blocks of its prompt, by block size in use.
        """
        self._num_requests += 1
        if self.is_on:
            self._write(
                now,
                "request",
                id=self._num_requests,
                prompt_tokens=num_prompt_tokens,
                max_tokens=max_tokens,
                sample_index=sample_index,
                tenant=self._tenants.number(tenant.encode()),
                priority=common_pb2.Priority.Name(priority).removeprefix("PRIORITY_").lower(),
                weight=weight,
                ttft_objective_ms=round(ttft_objective_ms, 3),
                prefix={str(size): self._blocks.runs(keys) for size, keys in prefix.items()},
            )
        return self._num_requests

    def placed(
        self, now: float, number: int, *, attempt: int, candidates: Sequence[route_explain_pb2.Candidate]
    ) -> None:
        """An attempt got its workers. attempt: 1 for the first."""
        if self.is_on:
            shown = [_fields(candidate) for candidate in candidates]
            self._write(now, "placed", id=number, attempt=attempt, candidates=shown)

    def ended(
        self,
        now: float,
        number: int,
        *,
        outcome: str,
        num_output_tokens: int,
        ttft_ms: float | None,
        itl_ms: float,
        prefill_worker: str,
        decode_worker: str,
        prefill: common_pb2.PrefillTimes | None,
        transfer_tail_ms: float,
        num_attempts: int,
    ) -> None:
        """An answer is over.

        ttft_ms: None if no token came.  prefill_worker, prefill: of the attempt that gave the first token;
        None if unknown.  decode_worker, transfer_tail_ms: of its last attempt; empty if it had none.
        """
        self._write(
            now,
            "ended",
            id=number,
            outcome=outcome,
            output_tokens=num_output_tokens,
            ttft_ms=None if ttft_ms is None else round(ttft_ms, 3),
            itl_ms=round(itl_ms, 3),
            prefill_worker=prefill_worker,
            decode_worker=decode_worker,
            prefill=None if prefill is None else _fields(prefill),
            transfer_tail_ms=round(transfer_tail_ms, 3),
            attempts=num_attempts,
        )

    def costs(
        self, now: float, model: CostModel, workers: Mapping[int, str], *, is_last: bool = False
    ) -> None:
        """Notes the fitted costs, at most once per COSTS_INTERVAL_S; call it as often as you like.

        workers: names by incarnation.  is_last: note them whenever the last time was, because the run ends.
        """
        if not self.is_on or (now - self._costs_at < COSTS_INTERVAL_S and not is_last):
            return
        self._costs_at = now
        for kind in KINDS:
            self._write(now, "costs", of=kind, worker="", coefficients=list(model.coefficients(kind)))
            if kind != "transfer":
                for incarnation, name in workers.items():
                    own = list(model.coefficients(kind, incarnation))
                    self._write(now, "costs", of=kind, worker=name, coefficients=own)

    def close(self) -> None:
        """Writes what is left. Idempotent; nothing is written afterwards."""
        self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, now: float, kind: str, **fields: Any) -> None:
        if self._file is None:
            return
        record = {"t": round(now - self._began_at, 6), "kind": kind, **fields}
        self._lines.append(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        if len(self._lines) >= FLUSH_RECORDS or now - self._flushed_at >= FLUSH_S:
            self._flushed_at = now
            self._flush()

    def _flush(self) -> None:
        text = b"".join(self._lines)
        self._lines = []
        if self._file is None or not text:
            return
        try:
            # A disk that is nearly full takes a part of it, without an error.
            reason = "" if self._file.write(text) == len(text) else "the disk is full"
        except OSError as error:
            reason = str(error)
        if reason:
            log.warning("decision log stopped", path=self._path, reason=reason)
            self._file.close()
            self._file = None


def _open(path: str) -> BinaryIO:
    """The file, unbuffered, at the beginning of a line: a run that was killed may have left half of one."""
    try:
        file = Path(path).open("a+b", buffering=0)  # noqa: SIM115 - open as long as the router runs
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
    except OSError as error:
        raise ConfigError(f"decision_log: {path} cannot be written: {error}", field="decision_log") from None
    return file


def _fields(message: Any) -> dict[str, Any]:
    """The fields of a message without messages in it, times rounded to a microsecond."""
    values = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
