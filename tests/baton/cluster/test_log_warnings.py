"""Which lines of the workers' logs are shown to whoever watches the cluster; logs written by hand."""

from __future__ import annotations

import json
from pathlib import Path

from baton.cluster.log_warnings import LogWarnings

NOT_COMPILED = {"event": "layers are not compiled", "reason": "no g++", "remedy": "install g++"}
TOO_LARGE = {"event": "KV exceeds float16", "saturated_values": 12, "remedy": "use bfloat16"}


def write(logs: Path, name: str, *entries: dict[str, object]) -> None:
    with (logs / f"{name}.log").open("a") as log:
        log.writelines(json.dumps(entry) + "\n" for entry in entries)


def test_each_warning_is_shown_once_with_its_worker_and_remedy(tmp_path: Path) -> None:
    warnings = LogWarnings(tmp_path)
    assert warnings.lines() == []
    write(tmp_path, "decode-0", {"event": "engine ready"}, NOT_COMPILED)
    write(tmp_path, "prefill-0", {"event": "no structured output", "reason": "x"})
    assert warnings.lines() == ["warning: decode-0: layers are not compiled: no g++; install g++"]
    assert warnings.lines() == []
    write(tmp_path, "decode-0", TOO_LARGE)
    assert warnings.lines() == ["warning: decode-0: KV exceeds float16 (12 values); use bfloat16"]


def test_those_of_an_earlier_run_are_not_shown(tmp_path: Path) -> None:
    write(tmp_path, "decode-0", NOT_COMPILED)
    warnings = LogWarnings(tmp_path)
    write(tmp_path, "decode-0", {"event": "engine ready"})
    assert warnings.lines() == []


def test_a_line_that_is_being_written_is_shown_when_it_is_whole(tmp_path: Path) -> None:
    warnings = LogWarnings(tmp_path)
    line = json.dumps(NOT_COMPILED)
    log = tmp_path / "decode-0.log"
    log.write_text("g++: not found\n" + line[:20])
    assert warnings.lines() == []
    log.write_text("g++: not found\n" + line + "\n")
    assert len(warnings.lines()) == 1
