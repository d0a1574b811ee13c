"""Build the Grafana dashboard `mtserve.json` from the panels below.

    python deploy/grafana/build.py            # write it
    python deploy/grafana/build.py --check    # exit status 1 if the file is stale

A panel is its title, its unit, what it tells, and its queries with their legends. `$where` stands
for the label filter that the dashboard's variables fill in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

OUTPUT = Path(__file__).parent / "mtserve.json"
WHERE = 'job=~"$job", instance=~"$instance"'
DATASOURCE = {"type": "prometheus", "uid": "$datasource"}
COLUMNS, WIDTH, HEIGHT = 3, 8, 8


class Query(NamedTuple):
    """PromQL and the legend of its lines."""

    expr: str
    legend: str


class Panel(NamedTuple):
    """One graph. `unit` is Grafana's name of it; `top` fixes the axis' upper end."""

    title: str
    unit: str
    tells: str
    queries: list[Query]
    top: float | None = None
    stacked: bool = False


class Row(NamedTuple):
    """Panels under one heading."""

    title: str
    panels: list[Panel]


def rate(metric: str, by: str = "", more: str = "") -> str:
    """Events per second of a counter, over all chosen instances."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate(mtserve_{metric}{{$where{more}}}[$__rate_interval]))"


def gauge(metric: str, by: str = "instance") -> str:
    """A gauge, per instance unless told otherwise."""
    return f"sum by ({by}) (mtserve_{metric}{{$where}})"


def quantiles(metric: str) -> list[Query]:
    """Three quantiles of a histogram."""
    return [
        Query(f"histogram_quantile({q}, {rate(f'{metric}_bucket', 'le')})", name)
        for q, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    ]


def mean(metric: str) -> str:
    """The mean of a histogram."""
    return f"{rate(f'{metric}_sum')} / {rate(f'{metric}_count')}"


HISTORY = rate("history_tokens_total")
NOT_OK = rate("requests_total", "outcome", ', outcome!="ok"')

ROWS = [
    Row("Requests", [
        Panel("Answers by outcome", "reqps",
              "Requests that reached the core: ok, or the code of the error.",
              [Query(rate("requests_total", "task, outcome"), "{{task}} {{outcome}}")]),
        Panel("Answers by HTTP status", "reqps",
              "All answers, also those that the server gave by itself.",
              [Query(rate("http_requests_total", "route, status"), "{{route}} {{status}}")]),
        Panel("Error share", "percentunit",
              "Share of the requests that reached the core, by code.",
              [Query(f"{NOT_OK} / on () group_left () {rate('requests_total')}", "{{outcome}}")]),
    ]),
    Row("Latency", [
        Panel("Request time", "s", "Admission to answer.", quantiles("request_seconds")),
        Panel("Time in the queue", "s", "Admission to the first piece.",
              quantiles("queue_seconds")),
        Panel("Waiting for copies", "s", "Per step: what its onloads made it wait.",
              quantiles("onload_wait_seconds")),
    ]),
    Row("Queue and admission", [
        Panel("Queue", "short", "Requests that wait, and those with a piece in a step.",
              [Query(gauge("requests_waiting"), "waiting {{instance}}"),
               Query(gauge("requests_running"), "running {{instance}}")]),
        Panel("HTTP", "short",
              "Requests that are being answered, open connections, and connections a second that"
              " ended because of their client.",
              [Query(gauge("http_requests_in_flight"), "requests {{instance}}"),
               Query(gauge("http_connections"), "connections {{instance}}"),
               Query(rate("http_connection_faults_total", "reason"), "{{reason}} /s")]),
        Panel("Past their deadline", "reqps",
              "admission: refused on arrival; queue: waited too long; launch: late just before its"
              " step.",
              [Query(rate("deadline_drops_total", "stage"), "{{stage}}")]),
    ]),
    Row("Steps", [
        Panel("Step time", "s", "Device time of a step.", quantiles("step_seconds")),
        Panel("A step holds", "short", "Means: rows, and pieces of requests.",
              [Query(mean("step_tokens"), "rows"), Query(mean("step_requests"), "pieces")]),
        Panel("Rows computed", "short", "Per second: history that was not found, and suffixes.",
              [Query(rate("computed_tokens_total"), "history"),
               Query(rate("suffix_tokens_total"), "suffix")], stacked=True),
        Panel("Device busy", "percentunit", "Share of the time in which a step runs.",
              [Query(rate("step_seconds_sum", "instance"), "{{instance}}")], top=1.0),
        Panel("Outside the cache", "reqps",
              "Requests that computed without pages of the pool, and pieces that ran alone because"
              " they cannot be cut.",
              [Query(rate("scratch_runs_total", "reason"), "{{reason}}"),
               Query(rate("uncut_pieces_total"), "uncut pieces")]),
    ]),
    Row("Where history tokens come from", [
        Panel("Share of history tokens", "percentunit",
              "Of all history tokens of answered requests; the three add up to 1.",
              [Query(f"{rate('hit_tokens_total', 'tier')} / on () group_left () {HISTORY}",
                     "{{tier}}"),
               Query(f"{rate('computed_tokens_total')} / {HISTORY}", "computed")],
              top=1.0, stacked=True),
        Panel("Invalidations", "short",
              "User states that were cut or removed, per second: diverged (the history does not"
              " match what was kept), refreshed, forgotten.",
              [Query(rate("invalidations_total", "reason"), "{{reason}}")]),
        Panel("Users with state", "short", "By tier.",
              [Query(gauge("users_resident", "tier"), "{{tier}}")]),
    ]),
    Row("Memory", [
        Panel("Fill", "percentunit", "Pages and chunks in use. Full is normal: it is a cache.",
              [Query(f"{gauge('device_pages_used')} / {gauge('device_pages_total')}",
                     "device {{instance}}"),
               Query(f"{gauge('host_chunks_used')} / {gauge('host_chunks_total')}",
                     "host {{instance}}")], top=1.0),
        Panel("Evicted pages", "short", "Per second, by tier.",
              [Query(rate("evicted_pages_total", "tier, reason"), "{{tier}} {{reason}}")]),
        Panel("Lost work", "short",
              "Tokens per second that were evicted before the host had them, and offloads that"
              " found no chunk.",
              [Query(rate("dropped_tokens_total"), "dropped tokens"),
               Query(rate("offload_skipped_total"), "skipped offloads")]),
    ]),
    Row("Copies", [
        Panel("Bytes", "Bps", "Moved between the tiers, and onloaded for nothing.",
              [Query(rate("copy_bytes_total", "direction"), "{{direction}}"),
               Query(rate("prefetch_wasted_bytes_total"), "wasted")]),
        Panel("Masking efficiency", "percentunit",
              "Share of the onload time that no step waited for.",
              [Query(f"{rate('onload_hidden_seconds_total')} / {rate('onload_seconds_total')}",
                     "hidden")], top=1.0),
        Panel("In flight and failed", "short",
              "Copies under way, and copies per second that failed or came too late.",
              [Query(gauge("copies_in_flight", "direction"), "{{direction}} in flight"),
               Query(rate("copy_failures_total"), "failed /s")]),
    ]),
    Row("Health", [
        Panel("Heartbeat age", "s", "Since the core's last sign of life; infinite at start.",
              [Query(gauge("heartbeat_age_seconds"), "{{instance}}")]),
        Panel("Weights versions", "short",
              "Instances with each version and its state; changes in the last five minutes.",
              [Query("count by (version, state) (mtserve_weights_version_info{$where} == 1)",
                     "{{version}} {{state}}"),
               Query("sum by (change) (increase(mtserve_weights_changes_total{$where}[5m]))",
                     "{{change}}")]),
        Panel("Up", "short", "Instances that answer scrapes.",
              [Query('sum by (job) (up{job=~"$job", instance=~"$instance"})', "{{job}}")]),
    ]),
]  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        panels.append({
            "id": len(panels) + 1, "type": "row", "title": row.title, "collapsed": False,
            "gridPos": {"h": 1, "w": COLUMNS * WIDTH, "x": 0, "y": y}, "panels": [],
        })  # fmt: skip
        for index, panel in enumerate(row.panels):
            line, column = divmod(index, COLUMNS)
            position = {
                "h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": y + 1 + line * HEIGHT,
            }  # fmt: skip
            panels.append(_graph(len(panels) + 1, panel, position))
        y += 1 + -(-len(row.panels) // COLUMNS) * HEIGHT
    return {
        "uid": "mtserve",
        "title": "mtserve",
        "tags": ["mtserve"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus"},
            _variable("job", "label_values(mtserve_requests_waiting, job)"),
            _variable("instance", 'label_values(mtserve_requests_waiting{job=~"$job"}, instance)'),
        ]},
        "panels": panels,
    }  # fmt: skip


def _graph(number: int, panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.top is not None:
        defaults["max"] = panel.top
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.tells,
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": query.expr.replace("$where", WHERE),
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "type": "query", "datasource": DATASOURCE, "definition": query,
        "query": {"query": query, "refId": name}, "refresh": 2, "sort": 1,
        "multi": True, "includeAll": True, "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        if OUTPUT.is_file() and OUTPUT.read_text() == text():
            return 0
        print(f"{OUTPUT.name} is stale: run python deploy/grafana/build.py", file=sys.stderr)
        return 1
    OUTPUT.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
