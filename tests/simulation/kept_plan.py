"""Plans that failed once, kept as files: they outlive every change of how plans are drawn.

A file is named `<seed>-<what it found>.json`. It holds one line per request, fault and worker.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.simulation.fault_plan import Fault, WorkerPlan
from tests.simulation.plan import Plan, RequestPlan
from tests.simulation.routing import RoutingPlan

FOLDER = Path(__file__).parent / "failed_once"
_PARTS: dict[str, type[Any]] = {"workers": WorkerPlan, "requests": RequestPlan, "faults": Fault}


def keep(plan: Plan, name: str) -> Path:
    """Writes a plan; name: what it found, in words joined by dashes."""
    lines = []
    for key, value in asdict(plan).items():
        if key in _PARTS:
            inner = ",\n".join(f"  {json.dumps(part)}" for part in value)
            lines.append(f" {json.dumps(key)}: [\n{inner}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    path = FOLDER / f"{plan.seed}-{name}.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return path


def kept() -> dict[str, Plan]:
    """All kept plans by the names of their files."""
    return {path.stem: _read(path) for path in sorted(FOLDER.glob("*.json"))}


def _read(path: Path) -> Plan:
    fields = {key: _frozen(value) for key, value in json.loads(path.read_text(encoding="utf-8")).items()}
    for key, kind in _PARTS.items():
        fields[key] = tuple(kind(**{k: _frozen(v) for k, v in part.items()}) for part in fields[key])
    if "routing" in fields:
        fields["routing"] = RoutingPlan(**{k: _frozen(v) for k, v in fields["routing"].items()})
    return Plan(**fields)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
