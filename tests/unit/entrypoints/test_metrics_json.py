"""The metrics as JSON."""

from __future__ import annotations

import json
import math

import msgspec

from engine.entrypoints.metrics_export import ServerMetrics
from engine.entrypoints.metrics_json import JsonSample, render
from engine.metrics import METRICS, Metrics, Sample


def test_counter_gauge_and_histogram_are_rendered_with_their_meaning() -> None:
    core = [
        Sample(name="step_requests", value=9.0, bucket_counts=(1, 0, 2, 0, 0, 0, 0, 0, 1)),
        Sample(name="requests_total", labels=("rank", "ok"), value=3.0),
        Sample(name="device_pages_used", value=7.0),
    ]
    rendered = json.loads(render(core, [Sample(name="heartbeat_age_seconds", value=0.25)]))
    # In the order of the lists of metrics, the server's own last.
    assert rendered == [
        {
            "name": "mtserve_device_pages_used",
            "kind": "gauge",
            "help": "Device pages in use.",
            "labels": {},
            "value": 7.0,
            "buckets": [],
            "bucket_counts": [],
        },
        {
            "name": "mtserve_requests_total",
            "kind": "counter",
            "help": "Requests that reached the core, by outcome: `ok` or the code of the error.",
            "labels": {"task": "rank", "outcome": "ok"},
            "value": 3.0,
            "buckets": [],
            "bucket_counts": [],
        },
        {
            "name": "mtserve_step_requests",
            "kind": "histogram",
            "help": "Pieces of a step.",
            "labels": {},
            "value": 9.0,
            "buckets": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0],
            "bucket_counts": [1, 0, 2, 0, 0, 0, 0, 0, 1],
        },
        {
            "name": "mtserve_heartbeat_age_seconds",
            "kind": "gauge",
            "help": "Since the core's last sign of life.",
            "labels": {},
            "value": 0.25,
            "buckets": [],
            "bucket_counts": [],
        },
    ]


def test_every_metric_without_labels_is_there_from_the_start() -> None:
    rendered = json.loads(render(Metrics().snapshot(), ServerMetrics().samples(0.0)))
    names = {each["name"] for each in rendered}
    for name, spec in METRICS.items():
        if not spec.labels:
            assert f"mtserve_{name}" in names
    for each in rendered:
        if each["kind"] == "histogram":
            assert len(each["bucket_counts"]) == len(each["buckets"]) + 1


def test_nothing_known_is_an_empty_list() -> None:
    assert render((), ()) == b"[]"


def test_a_heartbeat_that_has_not_come_has_no_age_and_the_document_says_so() -> None:
    (sample,) = json.loads(render((), [Sample(name="heartbeat_age_seconds", value=math.inf)]))
    assert sample["value"] is None
    (_, schemas) = msgspec.json.schema_components([JsonSample])
    assert schemas["JsonSample"]["properties"]["value"] == {
        "anyOf": [{"type": "number"}, {"type": "null"}]
    }
