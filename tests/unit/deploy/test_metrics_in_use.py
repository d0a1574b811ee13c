"""The dashboard and the alerts ask for metrics that the server exports, with their labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.entrypoints.metrics_export import SERVER_METRICS
from engine.errors import EngineError
from engine.metrics import METRICS
from engine.weights.life import State
from tests.unit.deploy import promql
from tests.unit.deploy.served import served

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
RANKING = ("/v1/rank", "/v1/retrieve", "/v2/models/m/infer")


def _panels() -> list[dict[str, Any]]:
    dashboard = json.loads((DEPLOY / "grafana/mtserve.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


TARGETS = {
    f"{panel['title']} {target['refId']}": target
    for panel in _panels()
    for target in panel["targets"]
}
EXPRESSIONS = {name: target["expr"] for name, target in TARGETS.items()} | {
    rule["alert"]: rule["expr"] for rule in _rules()
}


def _all_subclasses(kind: type[EngineError]) -> set[type[EngineError]]:
    return {kind}.union(*map(_all_subclasses, kind.__subclasses__()))


def _known_values(metric: str, label: str) -> set[str] | None:
    """What a label may be where the code says so; None where it depends on the traffic."""
    if label == "reason" and metric == "http_connection_faults_total":
        return {error.code for error in _all_subclasses(EngineError)} | {"answer_not_taken"}
    if label == "outcome":
        return {"ok"} | {error.code for error in _all_subclasses(EngineError)}
    if label == "route":
        return {route.name for route in map(served, ["POST"] * 3, RANKING) if route is not None}
    if label == "state":
        return {state.value for state in State}
    if label == "status":
        return {str(error.status) for error in _all_subclasses(EngineError)} | {"502"}
    return None


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_reads_series_that_are_exported(name: str) -> None:
    expression = promql.read(EXPRESSIONS[name])
    assert expression.selected
    labels = set(promql.TARGET_LABELS)
    for series, matchers in expression.selected:
        if series == "up":
            continue
        exported = promql.exported(series)
        assert exported is not None, series
        labels |= exported.labels
        for label, value in matchers:
            assert label in exported.labels, f"{series} has no label {label}"
            wanted = set() if label in promql.TARGET_LABELS else set(value.split("|"))
            index = exported.spec.labels.index(label) if label in exported.spec.labels else 0
            known = _known_values(exported.metric, label) or {
                values[index] for values in exported.spec.values
            }
            assert wanted <= known, f"{series} is never {label}={value}"
    assert expression.grouping <= labels, expression.grouping - labels


@pytest.mark.parametrize("name", TARGETS)
def test_a_legend_names_labels_that_are_left(name: str) -> None:
    legend = set(re.findall(r"{{(\w+)}}", TARGETS[name]["legendFormat"]))
    assert legend <= promql.read(TARGETS[name]["expr"]).grouping


def test_rates_are_of_counters_and_histograms_only() -> None:
    for name, text in EXPRESSIONS.items():
        for series in re.findall(r"\b(?:rate|increase|resets)\(mtserve_(\w+)", text):
            exported = promql.exported(f"mtserve_{series}")
            assert exported is not None
            assert exported.spec.kind != "gauge", f"{name}: {series}"


def test_the_dashboard_shows_every_metric() -> None:
    shown = {
        exported.metric
        for target in TARGETS.values()
        for series, _ in promql.read(target["expr"]).selected
        if (exported := promql.exported(series)) is not None
    }
    assert sorted((METRICS | SERVER_METRICS).keys() - shown) == []


@pytest.mark.parametrize(
    ("text", "series"),
    [
        ("sum(rate(mtserve_step_seconds_bucket[5m]))", "mtserve_step_seconds_bucket"),
        ("mtserve_step_seconds", "mtserve_step_seconds"),
        ("mtserve_requests_total_count", "mtserve_requests_total_count"),
    ],
)
def test_a_series_is_found_by_its_full_name_only(text: str, series: str) -> None:
    assert [each.series for each in promql.read(text).selected] == [series]
    assert (promql.exported(series) is not None) == series.endswith("_bucket")
