"""Prometheus text, and the page that lists the metrics."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from engine.entrypoints.metrics_export import SERVER_METRICS, ServerMetrics, markdown, render
from engine.metrics import METRICS, Metrics

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def test_a_snapshot_becomes_prometheus_text() -> None:
    metrics = Metrics()
    metrics.add("requests_total", 3, "rank", "ok")
    metrics.set("device_pages_used", 7)
    for seconds in (0.0001, 0.003, 0.004, 99.0):
        metrics.observe("queue_seconds", seconds)
    server = ServerMetrics()
    server.http_requests["infer", "200"] += 2
    text = render(metrics.snapshot(), server.samples(0.25)).decode()
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["mtserve_requests_total", ("outcome", "ok"), ("task", "rank")] == 3
    assert samples["mtserve_device_pages_used",] == 7
    assert samples["mtserve_queue_seconds_bucket", ("le", "0.0001")] == 1
    assert samples["mtserve_queue_seconds_bucket", ("le", "0.0025")] == 1
    assert samples["mtserve_queue_seconds_bucket", ("le", "0.005")] == 3
    assert samples["mtserve_queue_seconds_bucket", ("le", "10.0")] == 3
    assert samples["mtserve_queue_seconds_bucket", ("le", "+Inf")] == 4
    assert samples["mtserve_queue_seconds_count",] == 4
    assert samples["mtserve_queue_seconds_sum",] == 0.0001 + 0.003 + 0.004 + 99.0
    assert samples["mtserve_http_requests_total", ("route", "infer"), ("status", "200")] == 2
    assert samples["mtserve_heartbeat_age_seconds",] == 0.25


def test_every_metric_is_in_the_text_before_anything_happened() -> None:
    text = render((), ()).decode()
    for name, spec in {**METRICS, **SERVER_METRICS}.items():
        family = name.removesuffix("_total") if spec.kind == "counter" else name
        assert f"# TYPE mtserve_{family}" in text


def test_counters_whose_labels_are_known_start_at_zero() -> None:
    text = render(Metrics().snapshot(), ()).decode()
    assert 'mtserve_copy_bytes_total{direction="onload"} 0.0' in text
    assert 'mtserve_evicted_pages_total{reason="space",tier="host"} 0.0' in text
    for name, spec in METRICS.items():
        assert all(len(values) == len(spec.labels) for values in spec.values), name


def test_the_metrics_page_is_current() -> None:
    assert PAGE.read_text() == markdown(), (
        "run: python -m engine.entrypoints.metrics_export > docs/metrics.md"
    )
