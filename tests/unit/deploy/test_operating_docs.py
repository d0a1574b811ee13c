"""The pages for operators: complete, and their numbers are what the engine computes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from engine.block_manager.layout import Layout
from engine.config import CacheConfig, HealthConfig, SchedulerConfig
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.metrics_export import PREFIX, SERVER_METRICS
from engine.errors import EngineError
from engine.metrics import METRICS
from engine.models.base import ModelSpec
from engine.models.config import Feature, HstuLayers, Inputs, ModelConfig, RankHead
from engine.models.hstu.model import HstuModel
from engine.models.random_weights import random_tensors
from engine.platforms.cpu import HostArena, KvPools
from tests.unit.deploy import promql
from tests.unit.deploy.served import served

ROOT = Path(__file__).parents[3]
OPERATE = (ROOT / "docs/operate.md").read_text()
TROUBLE = (ROOT / "docs/troubleshooting.md").read_text()
DEPLOY = (ROOT / "docs/deploy.md").read_text()
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())


def _section(page: str, heading: str) -> str:
    """The text under a heading, up to the next one of its level or above."""
    level = heading.partition(" ")[0]
    after = page.partition(f"\n{heading}\n")[2]
    return re.split(rf"^#{{1,{len(level)}}} ", after, maxsplit=1, flags=re.MULTILINE)[0]


def _all_errors(kind: type[EngineError] = EngineError) -> list[type[EngineError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _all_errors(child))]


def test_every_metric_is_explained() -> None:
    named = set(re.findall(rf"{PREFIX}(\w+)", OPERATE))
    assert sorted((METRICS | SERVER_METRICS).keys() - named) == []


def test_every_named_series_is_exported() -> None:
    for page in (OPERATE, TROUBLE, DEPLOY):
        for series in re.findall(rf"\b{PREFIX}\w+", page):
            metric = series.removeprefix(PREFIX)
            assert metric in METRICS | SERVER_METRICS or promql.exported(series), series


@pytest.mark.parametrize(
    "text", re.findall(r"^\| .* \| `(.*mtserve_.*)` \|", OPERATE, re.MULTILINE)
)
def test_a_query_of_the_page_can_be_asked(text: str) -> None:
    assert all(promql.exported(each.series) for each in promql.read(text).selected)


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    alerts = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}
    sections = re.findall(r"^### (Mtserve\w+)$", OPERATE, re.MULTILINE)
    assert sorted(sections) == sorted(alerts)
    for name in sections:
        severity = alerts[name]["labels"]["severity"]
        assert f"({severity})" in _section(OPERATE, f"### {name}"), name


def test_every_error_code_has_a_section_with_its_status() -> None:
    headings = re.findall(r"^### `(\w+)`(?: \((\d+)\))?$", _section(TROUBLE, "## By code"), re.M)
    found = dict(headings)
    assert found.keys() == {error.code for error in _all_errors()}
    for error in _all_errors():
        assert found[error.code] == str(error.status)


@pytest.mark.parametrize("page", ["operate", "troubleshooting", "deploy", "security"])
def test_routes_that_a_page_names_are_served(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    named = re.findall(r"\b(GET|POST|DELETE) (/v[12][\w/:{}.]*)", text)
    named += [("POST", path) for path in re.findall(r"curl .*localhost:8000(/\S+) -d", text)]
    for method, path in named:
        assert served(method, path) is not None, f"{method} {path}"


def test_options_that_pages_name_exist() -> None:
    options = (ROOT / "docs/configuration.md").read_text()
    for page in (OPERATE, TROUBLE, DEPLOY):
        for name in re.findall(
            r"`((?:max|drain|copy|heartbeat|keep_alive|device|host)_\w+|weights_(?:root|share)|canary_share|refresh_users)`",
            page,
        ):
            known = (
                f".{name}`" in options
                or f"`{name}`" in (ROOT / "docs/model-directory.md").read_text()
            )
            assert known, name


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    """The worked example's model. What is not K/V is small."""
    config = ModelConfig(
        name="example",
        dtype="bfloat16",
        layers=HstuLayers(
            family="nvidia", num_layers=8, hidden_size=8, num_heads=4, qk_dim=128, v_dim=128,
            scale_length=100,
        ),
        inputs=Inputs(features=[Feature(name="item", num_rows=4)], max_history_events=100),
        rank=RankHead(kind="dot"),
    )  # fmt: skip
    return HstuModel(config, random_tensors(config, item_ids=torch.arange(4)), "example").spec


def test_the_worked_example_is_what_the_engine_computes(spec: ModelSpec) -> None:
    cache = CacheConfig(device_pages=4096, page_size=32, chunk_size=256, host_bytes=8 << 30)
    user_tokens = 2000
    bytes_per_token = spec.bytes_per_token_layer * spec.num_layers
    # Pools of two pages and two chunks tell the sizes of one; nothing here takes 10 GiB.
    pools = KvPools(spec, cache.page_size, 2, scratch_pages=1, poison=False)
    arena = HostArena.within(2 * cache.chunk_size * bytes_per_token, pools, cache.chunk_size)
    layout = Layout(
        page_size=cache.page_size,
        pages_per_chunk=arena.pages_per_chunk,
        page_bytes=pools.page_bytes * spec.num_layers,
    )
    assert arena.num_chunks == 2
    chunk_bytes = arena.num_bytes // 2
    chunks = cache.host_bytes // chunk_bytes
    host_user_chunks = layout.chunks_for(layout.floor(user_tokens))
    scratch_pages = layout.pages_for(SchedulerConfig().max_uncut_tokens) + 1
    expected = {
        "bytes of a token": bytes_per_token,
        "bytes of a page": layout.bytes_of(1),
        "device tokens": layout.page_start(cache.device_pages),
        "device bytes": layout.bytes_of(cache.device_pages),
        "bytes of a chunk": chunk_bytes,
        "host chunks": chunks,
        "host tokens": chunks * layout.chunk_tokens,
        "pages of a user": layout.pages_for(user_tokens),
        "chunks of a user": host_user_chunks,
        "users on the device": cache.device_pages // layout.pages_for(user_tokens),
        "users in the host": chunks // host_user_chunks,
        "users per GiB of host": (1 << 30) // (host_user_chunks * chunk_bytes),
        "bytes of the scratch pool": scratch_pages * pools.page_bytes,
    }
    rows = re.findall(r"^\| ([a-z][\w ]+\w) \| ([\d,]+) \|$", OPERATE, re.MULTILINE | re.I)
    assert {name: int(value.replace(",", "")) for name, value in rows} == expected


def test_the_alerts_become_a_prometheus_rule_as_described(tmp_path: Path) -> None:
    (script,) = [
        example
        for example in re.findall(r"^```sh\n(.*?)^```$", DEPLOY, re.MULTILINE | re.DOTALL)
        if "PrometheusRule" in example
    ]
    script, is_piped, _ = script.rpartition(" | kubectl")
    assert is_piped
    done = subprocess.run(["sh", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    resource = yaml.safe_load(done.stdout)
    assert resource["kind"] == "PrometheusRule"
    assert resource["spec"] == ALERTS


def test_every_file_that_the_deploy_page_names_is_there() -> None:
    for name in re.findall(r"`?(deploy/[\w./-]*\w)", DEPLOY):
        assert (ROOT / name).exists(), name


def test_the_deploy_page_gives_the_numbers_of_the_manifests() -> None:
    manifest = yaml.safe_load((ROOT / "deploy/kubernetes/statefulset.yaml").read_text())
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    startup, liveness = container["startupProbe"], container["livenessProbe"]
    for stated in (
        f"| {startup['failureThreshold']} x {startup['periodSeconds']} s |",
        f"| {liveness['failureThreshold']} failures, {liveness['periodSeconds']} s apart |",
        f"`preStop` sleeps {container['lifecycle']['preStop']['exec']['command'][1]} s.",
        f"`drain_timeout_s` ({ServerConfig().drain_timeout_s:.0f} s)",
        f"`heartbeat_timeout_s` ({ServerConfig().heartbeat_timeout_s:g} s)",
        f"`heartbeat_kill_s` ({HealthConfig().heartbeat_kill_s:g} s)",
        f"`terminationGracePeriodSeconds` is {pod['terminationGracePeriodSeconds']},",
    ):
        assert stated in DEPLOY, stated
