"""The metrics as JSON, out of the same snapshots as the Prometheus text.

For the page and for scripts that would not parse Prometheus text: `GET /v1/metrics.json`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from engine.entrypoints.metrics_export import PREFIX, SERVER_METRICS
from engine.entrypoints.protocol import to_json
from engine.metrics import METRICS, MetricSpec, Sample


class JsonSample(msgspec.Struct, frozen=True, kw_only=True):
    """One value of one metric.

    For a histogram `value` is the sum of the observations, `buckets` are the upper edges, and
    `bucket_counts` (not cumulative) has one more: the observations above the last edge. Both are
    empty for counters and gauges. `value` is null where Prometheus has `+Inf`, which JSON lacks:
    the age of a heartbeat that has not come yet.
    """

    name: str
    kind: str
    help: str
    labels: dict[str, str]
    value: float | None
    buckets: tuple[float, ...]
    bucket_counts: tuple[int, ...]


def json_samples(
    core_samples: Sequence[Sample], server_samples: Sequence[Sample]
) -> list[JsonSample]:
    """Every sample under its full name, in the order of the lists of metrics."""
    return [*_described(METRICS, core_samples), *_described(SERVER_METRICS, server_samples)]


def _described(specs: dict[str, MetricSpec], samples: Sequence[Sample]) -> Iterator[JsonSample]:
    order = {name: index for index, name in enumerate(specs)}
    for sample in sorted(samples, key=lambda sample: order[sample.name]):
        spec = specs[sample.name]
        yield JsonSample(
            name=PREFIX + sample.name,
            kind=spec.kind,
            help=spec.help,
            labels=dict(zip(spec.labels, sample.labels, strict=True)),
            value=sample.value if math.isfinite(sample.value) else None,
            buckets=spec.buckets,
            bucket_counts=sample.bucket_counts,
        )


def render(core_samples: Sequence[Sample], server_samples: Sequence[Sample]) -> bytes:
    """Everything as one JSON list."""
    return to_json(json_samples(core_samples, server_samples))
