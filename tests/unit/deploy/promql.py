"""What a PromQL expression reads: metrics with their matchers, and the labels it groups by."""

from __future__ import annotations

from typing import Any, NamedTuple

import promql_parser

from engine.entrypoints.metrics_export import PREFIX, SERVER_METRICS
from engine.metrics import METRICS, MetricSpec

TARGET_LABELS = {"job", "instance"}
"""What Prometheus puts on every series it scrapes."""
_SPECS = METRICS | SERVER_METRICS
_HISTOGRAM_SERIES = ("_bucket", "_sum", "_count")


class Selected(NamedTuple):
    """One selector: the series' name and its matchers as (label, value)."""

    series: str
    matchers: list[tuple[str, str]]


class Expression(NamedTuple):
    """What was found in an expression."""

    selected: list[Selected]
    grouping: set[str]


def read(text: str) -> Expression:
    """Parse an expression; Grafana's own variables stand for a plain value. Raises ValueError."""
    text = text.replace("$__rate_interval", "5m").replace("$job", ".*").replace("$instance", ".*")
    selected: list[Selected] = []
    grouping: set[str] = set()

    def visit(node: Any) -> None:
        match type(node).__name__:
            case "VectorSelector":
                matchers = [(each.name, each.value) for each in node.matchers.matchers]
                selected.append(Selected(node.name, matchers))
            case "AggregateExpr" if node.modifier is not None:
                grouping.update(node.modifier.labels)
            case "BinaryExpr" if node.modifier is not None:
                if node.modifier.matching is not None:
                    grouping.update(node.modifier.matching.labels)
                grouping.update(node.modifier.group_labels or ())

    promql_parser.walk(promql_parser.parse(text), visit)
    return Expression(selected, grouping)


class Series(NamedTuple):
    """A series the server exports: its metric without prefix, and the labels it has."""

    metric: str
    spec: MetricSpec
    labels: set[str]


def exported(series: str) -> Series | None:
    """The exported series of that name, or None."""
    name = series.removeprefix(PREFIX)
    if not series.startswith(PREFIX):
        return None
    spec = _SPECS.get(name)
    if spec is not None and spec.kind != "histogram":
        return Series(name, spec, {*spec.labels, *TARGET_LABELS})
    for ending in _HISTOGRAM_SERIES:
        metric = name.removesuffix(ending)
        spec = _SPECS.get(metric) if metric != name else None
        if spec is not None and spec.kind == "histogram":
            more = {"le"} if ending == "_bucket" else set[str]()
            return Series(metric, spec, {*spec.labels, *TARGET_LABELS, *more})
    return None
