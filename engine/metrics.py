"""Counters, gauges and histograms of the core, without any client library.

`METRICS` is the whole list (the docs are generated from it). The core owns one `Metrics`; the
server turns its snapshots into Prometheus text. Names carry base units and never a user id.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal, NamedTuple

import msgspec


class MetricSpec(NamedTuple):
    """One metric: kind, help text, label names, and for histograms the upper bucket edges.

    values: What its labels are where that is known beforehand. A counter of these is there from
    the start, at 0, so that the first event is a rise.
    """

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()


_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
            2.5, 5.0, 10.0)  # fmt: skip
_TOKENS = tuple(float(4**power) for power in range(10))
_TIERS = (("device",), ("host",))
_DIRECTIONS = (("onload",), ("offload",))
_REQUESTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

METRICS: dict[str, MetricSpec] = {
    "requests_waiting": MetricSpec("gauge", "Requests in the queue."),
    "requests_running": MetricSpec("gauge", "Requests with a piece in a running or planned step."),
    "device_pages_used": MetricSpec("gauge", "Device pages in use."),
    "device_pages_total": MetricSpec("gauge", "Usable device pages."),
    "host_chunks_used": MetricSpec("gauge", "Host chunks in use."),
    "host_chunks_total": MetricSpec("gauge", "Host chunks of the arena."),
    "users_resident": MetricSpec("gauge", "Users with state in the tier.", ("tier",), (), _TIERS),
    "copies_in_flight": MetricSpec(
        "gauge", "Transfers not yet finished.", ("direction",), (), _DIRECTIONS
    ),
    "weights_version_info": MetricSpec(
        "gauge", "1 for each loaded version and the state it is in.", ("version", "state")
    ),
    "weights_changes_total": MetricSpec(
        "counter",
        "Weights versions that changed their state, and loads that failed.",
        ("change",),
        (),
        (("loaded",), ("load_failed",), ("activated",), ("retired",), ("catalogue",)),
    ),
    "requests_total": MetricSpec(
        "counter",
        "Requests that reached the core, by outcome: `ok` or the code of the error.",
        ("task", "outcome"),
    ),
    "history_tokens_total": MetricSpec("counter", "History tokens asked for: the denominator."),
    "hit_tokens_total": MetricSpec(
        "counter", "History tokens found in a tier.", ("tier",), (), _TIERS
    ),
    "computed_tokens_total": MetricSpec("counter", "History tokens computed."),
    "suffix_tokens_total": MetricSpec("counter", "Suffix tokens computed."),
    "evicted_pages_total": MetricSpec(
        "counter",
        "Pages evicted.",
        ("tier", "reason"),
        (),
        (("device", "space"), ("host", "space")),
    ),
    "dropped_tokens_total": MetricSpec("counter", "Evicted tokens that no lower tier had."),
    "copy_bytes_total": MetricSpec(
        "counter", "Bytes moved between tiers.", ("direction",), (), _DIRECTIONS
    ),
    "copy_failures_total": MetricSpec("counter", "Copies that failed or came too late."),
    "offload_skipped_total": MetricSpec("counter", "Offloads skipped: no host chunk to be had."),
    "deadline_drops_total": MetricSpec(
        "counter",
        "Requests past their deadline.",
        ("stage",),
        (),
        (("admission",), ("queue",), ("launch",)),
    ),
    "invalidations_total": MetricSpec(
        "counter",
        "User states cut or removed.",
        ("reason",),
        (),
        (("diverged",), ("refreshed",), ("forgotten",), ("retired",), ("reset",)),
    ),
    "prefetch_wasted_bytes_total": MetricSpec("counter", "Bytes onloaded and never used."),
    "scratch_runs_total": MetricSpec(
        "counter",
        "Requests served outside the cache.",
        ("reason",),
        (),
        (("bypass",), ("query_time",), ("never_fits",)),
    ),
    "uncut_pieces_total": MetricSpec(
        "counter", "Pieces that ran alone because they cannot be cut."
    ),
    "onload_seconds_total": MetricSpec("counter", "Seconds that onloads took."),
    "onload_hidden_seconds_total": MetricSpec("counter", "Of them, seconds nothing waited for."),
    "queue_seconds": MetricSpec("histogram", "Admission to first piece.", (), _SECONDS),
    "onload_wait_seconds": MetricSpec("histogram", "Waiting for copies, per step.", (), _SECONDS),
    "step_seconds": MetricSpec("histogram", "Device time of a step.", (), _SECONDS),
    "request_seconds": MetricSpec("histogram", "Admission to answer.", (), _SECONDS),
    "step_tokens": MetricSpec("histogram", "Rows of a step.", (), _TOKENS),
    "step_requests": MetricSpec("histogram", "Pieces of a step.", (), _REQUESTS),
}


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One value (counter, gauge) or one histogram (counts per bucket, the last one above all)."""

    name: str
    labels: tuple[str, ...] = ()
    value: float = 0.0
    bucket_counts: tuple[int, ...] = ()


class Metrics:
    """The core's metrics. Owned by the core thread; `snapshot` is safe to send elsewhere."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._counts: dict[str, list[int]] = {}
        for name, spec in METRICS.items():
            if spec.kind == "histogram":
                self._counts[name] = [0] * (len(spec.buckets) + 1)
                self._values[name, ()] = 0.0
            elif not spec.labels:
                self._values[name, ()] = 0.0
            elif spec.kind == "counter":
                self._values |= {(name, labels): 0.0 for labels in spec.values}

    def add(self, name: str, amount: float = 1.0, *labels: str) -> None:
        """Raise a counter. Negative amounts are a bug of the caller and are refused."""
        spec = METRICS[name]
        assert spec.kind == "counter" and len(labels) == len(spec.labels), name
        assert amount >= 0, f"{name} would fall by {-amount}"
        key = (name, labels)
        self._values[key] = self._values.get(key, 0.0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        spec = METRICS[name]
        assert spec.kind == "gauge" and len(labels) == len(spec.labels), name
        self._values[name, labels] = value

    def remove(self, name: str, *labels: str) -> None:
        """Take a gauge's sample away: what it told of is no longer there."""
        assert METRICS[name].kind == "gauge", name
        self._values.pop((name, labels), None)

    def observe(self, name: str, value: float) -> None:
        """Add an observation to a histogram."""
        spec = METRICS[name]
        assert spec.kind == "histogram", name
        self._counts[name][bisect_left(spec.buckets, value)] += 1
        self._values[name, ()] += value

    def value(self, name: str, *labels: str) -> float:
        """The current value of a counter or gauge, or the sum of a histogram."""
        return self._values.get((name, labels), 0.0)

    def snapshot(self) -> list[Sample]:
        """All current values."""
        return [
            Sample(
                name=name,
                labels=labels,
                value=value,
                bucket_counts=tuple(self._counts.get(name, ())),
            )
            for (name, labels), value in self._values.items()
        ]
