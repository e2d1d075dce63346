"""Renders the chart with Helm's own engine, as `helm template` does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

from checks.chart_values import CHART

RELEASE, NAMESPACE = "demo", "prod"


def render(
    files: Iterable[Path] = (), values: Mapping[str, Any] | None = None, chart: Path = CHART
) -> dict[str, str]:
    """Text of each template that gives anything, by its path below templates/.

    files: values files, the later over the earlier; values: over all of them.

    Raises helm.HelmError if the values are refused.
    """
    merged: dict[str, Any] = {}
    for path in files:
        merged = overlaid(merged, yaml.safe_load(path.read_text()))
    with helm.Chart.load(str(chart)) as loaded:
        rendered = loaded.render(overlaid(merged, values or {}), name=RELEASE, namespace=NAMESPACE)
    texts = {name.partition("/templates/")[2]: text for name, text in rendered.items()}
    return {
        name.replace("/", "-"): text.strip() + "\n" for name, text in sorted(texts.items()) if text.strip()
    }


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Maps merged key by key, as Helm merges values files."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(under, Mapping) and isinstance(value, Mapping)
        merged[key] = overlaid(under, value) if both else value  # type: ignore[arg-type]
    return merged
