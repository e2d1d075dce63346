"""The chart's objects as tests see them: rendered once per set of values, and what pods run in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from checks.chart_render import render
from checks.chart_values import CHART

EXAMPLES = ("defaults", *sorted(path.stem for path in CHART.glob("examples/*.yaml")))
Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod that some object makes. owner: that object; labels: of the pod."""

    owner: Object
    labels: dict[str, str]
    spec: Object

    @property
    def component(self) -> str:
        """Its role."""
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[Object]:
        """All of them, those of the start included."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def rendered(example: str, **values: Any) -> list[Object]:
    """The objects of an example of values, or of the defaults."""
    files = [] if example == "defaults" else [CHART / "examples" / f"{example}.yaml"]
    texts = render(files, values)
    return [
        found
        for name, text in texts.items()
        if name.endswith(".yaml")
        for found in yaml.load_all(text, Loader=yaml.CSafeLoader)
        if found
    ]


@cache
def of_example(example: str) -> tuple[Object, ...]:
    """As rendered(), once; not to be changed."""
    return tuple(rendered(example))


def of_kind(objects: tuple[Object, ...] | list[Object], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def pods(objects: tuple[Object, ...] | list[Object]) -> Iterator[Pod]:
    """Of Deployments, StatefulSets, RayClusters and bare pods."""
    for found in objects:
        spec = found.get("spec", {})
        if found["kind"] in ("Deployment", "StatefulSet"):
            yield Pod(found, spec["template"]["metadata"]["labels"], spec["template"]["spec"])
        elif found["kind"] == "Pod":
            yield Pod(found, found["metadata"]["labels"], spec)
        elif found["kind"] == "RayCluster":
            for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
                yield Pod(found, group["template"]["metadata"]["labels"], group["template"]["spec"])


def name_of(found: Object) -> str:
    """For the messages of failures."""
    return f"{found['kind']} {found['metadata']['name']}"


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector takes a pod."""
    equal = selector.get("matchLabels", {})
    if any(labels.get(key) != value for key, value in equal.items()):
        return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True


def config_of(objects: tuple[Object, ...] | list[Object]) -> str:
    """The text of baton.toml."""
    (found,) = of_kind(objects, "ConfigMap")
    return str(found["data"]["baton.toml"])
