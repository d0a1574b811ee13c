"""The alert rules: valid, complete, documented, and each fires when it should and only then."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy/prometheus"
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian package prometheus)"
)


class Case(NamedTuple):
    """Series for two hours by the minute, as promtool writes them; and what is asked about them.

    Without `fires`, a healthy server: no alert may fire.
    """

    name: str
    series: dict[str, str]
    fires: set[str]


_HEALTHY = {
    "up": "1x120",
    "mtserve_heartbeat_age_seconds": "0.1x120",
    "mtserve_requests_waiting": "3x120",
    "mtserve_requests_running": "4x120",
    "mtserve_step_seconds_count": "0+600x120",
    "mtserve_step_seconds_sum": "0+30x120",
    'mtserve_weights_version_info{version="1",state="active"}': "1x120",
    'mtserve_requests_total{task="rank",outcome="ok"}': "0+6000x120",
    'mtserve_requests_total{task="rank",outcome="overloaded"}': "0+6x120",
    'mtserve_requests_total{task="rank",outcome="deadline_exceeded"}': "0+6x120",
    'mtserve_http_requests_total{route="rank",status="200"}': "0+6000x120",
    'mtserve_http_requests_total{route="rank",status="400"}': "0+6x120",
    'mtserve_http_requests_total{route="rank",status="503"}': "0+6x120",
    'mtserve_http_requests_total{route="rank",status="500"}': "0x120",
    'mtserve_request_seconds_bucket{le="0.1"}': "0+5990x120",
    'mtserve_request_seconds_bucket{le="1.0"}': "0+6000x120",
    'mtserve_request_seconds_bucket{le="+Inf"}': "0+6000x120",
    'mtserve_hit_tokens_total{tier="device"}': "0+5000000x120",
    'mtserve_hit_tokens_total{tier="host"}': "0+4000000x120",
    "mtserve_history_tokens_total": "0+10000000x120",
    "mtserve_computed_tokens_total": "0+1000000x120",
    "mtserve_dropped_tokens_total": "0+10000x120",
    'mtserve_invalidations_total{reason="diverged"}': "0+60x120",
    "mtserve_offload_skipped_total": "0x120",
    "mtserve_copy_failures_total": "0x120",
    "mtserve_onload_seconds_total": "0+10x120",
    "mtserve_onload_hidden_seconds_total": "0+9x120",
    "mtserve_onload_wait_seconds_sum": "0+1x120",
    'mtserve_scratch_runs_total{reason="never_fits"}': "0+6x120",
}
CASES = [
    Case("healthy", {}, set()),
    Case("no scrape", {"up": "1x60 0x60"}, {"MtserveDown"}),
    Case("silent core", {"mtserve_heartbeat_age_seconds": "0.1x60 5+60x60"}, {"MtserveCoreSilent"}),
    Case("slow start", {"mtserve_heartbeat_age_seconds": "Inf " * 120}, {"MtserveStartsSlowly"}),
    Case("stuck step", {"mtserve_step_seconds_count": "0+600x60 36000x60"},
         {"MtserveStepsStopped"}),
    Case("idle server", {"mtserve_step_seconds_count": "0+600x60 36000x60",
                         "mtserve_requests_waiting": "0x120",
                         "mtserve_requests_running": "0x120"}, set()),
    Case("restarts", {"mtserve_step_seconds_count": "0+600x100 0+600x5 0+600x13"},
         {"MtserveRestarts"}),
    Case("one on standby", {'mtserve_weights_version_info{version="2",state="standby"}': "1x120"},
         set()),
    Case("a load failed", {'mtserve_weights_changes_total{change="load_failed"}': "0x100 1x20"},
         {"MtserveWeightsNotLoaded"}),
    Case("half-way", {'up{job="mtserve",instance="b:8000"}': "1x120",
                      'mtserve_weights_version_info{job="mtserve",instance="b:8000",version="2",state="active"}':
                          "1x120"}, {"MtserveWeightsDiffer"}),
    Case("503", {'mtserve_http_requests_total{route="rank",status="503"}': "0+100x120"},
         {"MtserveServerErrors"}),
    Case("one 500", {'mtserve_http_requests_total{route="rank",status="500"}': "0x115 1x5"},
         {"MtserveInternalError"}),
    Case("429", {'mtserve_requests_total{task="rank",outcome="overloaded"}': "0+100x120"},
         {"MtserveRefusing"}),
    Case("504", {'mtserve_requests_total{task="rank",outcome="deadline_exceeded"}': "0+100x120"},
         {"MtserveDeadlinesMissed"}),
    Case("slow", {'mtserve_request_seconds_bucket{le="0.1"}': "0+5900x120"}, {"MtserveSlow"}),
    Case("400", {'mtserve_http_requests_total{route="rank",status="400"}': "0+400x120"},
         {"MtserveClientErrors"}),
    Case("connections", {'mtserve_http_connection_faults_total{reason="too_many_connections"}':
                         "0+10x120"}, {"MtserveConnectionsRefused"}),
    Case("edits", {'mtserve_invalidations_total{reason="diverged"}': "0+700x120"},
         {"MtserveHistoriesDiverge"}),
    Case("dropped", {"mtserve_dropped_tokens_total": "0+300000x120"}, {"MtserveStateDropped"}),
    Case("no chunk", {"mtserve_offload_skipped_total": "0+1x120"}, {"MtserveOffloadsSkipped"}),
    Case("a failed copy", {"mtserve_copy_failures_total": "0x115 1x5"}, {"MtserveCopiesFail"}),
    Case("unhidden", {"mtserve_onload_hidden_seconds_total": "0+4x120",
                      "mtserve_onload_wait_seconds_sum": "0+6x120"}, {"MtserveOnloadsNotHidden"}),
    Case("too long", {'mtserve_scratch_runs_total{reason="never_fits"}': "0+100x120"},
         {"MtserveHistoriesNeverFit"}),
    Case("hits fell", {'mtserve_hit_tokens_total{tier="host"}': "0+4000000x60 240000000x60"},
         {"MtserveHitRateFell"}),
]  # fmt: skip


def test_every_alert_says_how_bad_what_and_why() -> None:
    assert len(RULES) == 21
    for name, rule in RULES.items():
        assert re.fullmatch(r"Mtserve[A-Z]\w+", name)
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_every_alert_is_fired_by_a_case() -> None:
    assert set().union(*(case.fires for case in CASES)) == RULES.keys()


@needs_promtool
def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    assert PROMTOOL is not None
    for command in (["config", "prometheus.yml"], ["rules", "alerts.yml"]):
        done = subprocess.run(
            [PROMTOOL, "check", *command], cwd=FOLDER, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@needs_promtool
def test_an_alert_fires_on_its_case_and_no_other_does(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    tests = []
    for case in CASES:
        series = {_with_target(name): values for name, values in (_HEALTHY | case.series).items()}
        tests.append({
            "name": case.name,
            "interval": "1m",
            "input_series": [{"series": each, "values": series[each]} for each in series],
            "promql_expr_test": [{
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "118m",
                "exp_samples": [
                    {"labels": f'{{alertname="{name}"}}', "value": 1}
                    for name in sorted(case.fires)
                ],
            }],
        })  # fmt: skip
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(FOLDER / "alerts.yml")], "tests": tests}))
    done = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _with_target(series: str) -> str:
    """The series as scraped from instance a, unless it says from where."""
    if "instance=" in series:
        return series
    name, _, labels = series.rstrip("}").partition("{")
    return f'{name}{{job="mtserve",instance="a:8000"{"," if labels else ""}{labels}}}'
