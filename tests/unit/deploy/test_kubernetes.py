"""The manifests for Kubernetes and KServe agree with the server and with each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.core_launch import CoreOptions
from engine.entrypoints import api_server
from engine.entrypoints.cli import Arguments, serve_config
from engine.entrypoints.config import ServeConfig
from engine.entrypoints.routes.routing import Access
from tests.unit.deploy import promql
from tests.unit.deploy.served import served

DEPLOY = Path(__file__).parents[3] / "deploy"
FOLDER = DEPLOY / "kubernetes"
GIB = 1 << 30


def _manifest(name: str) -> dict[str, Any]:
    (document,) = yaml.safe_load_all((DEPLOY / name).read_text())
    assert isinstance(document, dict)
    return document


STATEFUL_SET = _manifest("kubernetes/statefulset.yaml")
POD = STATEFUL_SET["spec"]["template"]["spec"]
RUNTIME = _manifest("kserve/servingruntime.yaml")
CONTAINERS = {"kubernetes": POD["containers"][0], "kserve": RUNTIME["spec"]["containers"][0]}
GRACE_S = {
    "kubernetes": POD["terminationGracePeriodSeconds"],
    "kserve": _manifest("kserve/inferenceservice.yaml")["spec"]["predictor"][
        "terminationGracePeriodSeconds"
    ],
}
each_container = pytest.mark.parametrize("kind", CONTAINERS)


def _config(kind: str) -> ServeConfig:
    """What the server makes of the container's arguments."""
    return serve_config(Arguments(CONTAINERS[kind]["args"], None))


def _bytes(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi")) * GIB


@each_container
def test_the_arguments_are_flags_of_the_server(kind: str) -> None:
    config = _config(kind)
    assert config.model in ("/models/current", "/mnt/models")
    assert config.engine.cache.host_bytes == 8 * GIB


def test_keys_come_from_files_of_a_mounted_secret() -> None:
    security = _config("kubernetes").server.security
    files = [Path(name or "") for name in (security.api_key_file, security.admin_api_key_file)]
    mounts = {mount["mountPath"]: mount for mount in CONTAINERS["kubernetes"]["volumeMounts"]}
    assert len({*files}) == 2
    for file in files:
        mount = mounts[str(file.parent)]
        (volume,) = [each for each in POD["volumes"] if each["name"] == mount["name"]]
        assert "secret" in volume
    assert (security.api_key, security.admin_api_key) == ((), ())


@each_container
def test_probes_ask_routes_that_are_served_on_the_port(kind: str) -> None:
    container = CONTAINERS[kind]
    (port,) = container["ports"]
    assert port["containerPort"] == 8000
    for probe, path in (
        ("startupProbe", "/v2/health/ready"),
        ("readinessProbe", "/v2/health/ready"),
        ("livenessProbe", "/v2/health/live"),
    ):
        asked = container[probe]["httpGet"]
        assert (asked["path"], asked["port"] in (port["name"], 8000)) == (path, True)
        route = served("GET", path)
        assert route is not None
        assert route.access is Access.OPEN


@each_container
def test_liveness_is_more_patient_than_the_watchdog(kind: str) -> None:
    """A silent core has the time to say what it was doing and to end by itself."""
    probe = CONTAINERS[kind]["livenessProbe"]
    patience_s = probe["periodSeconds"] * (probe["failureThreshold"] - 1)
    config = _config(kind)
    assert patience_s > config.server.heartbeat_timeout_s
    assert patience_s > config.engine.health.heartbeat_kill_s + 2


@each_container
def test_the_grace_period_covers_drain_and_end(kind: str) -> None:
    sleep, sleep_s = CONTAINERS[kind]["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    # The answers of gRPC, if it is on, and then those of HTTP.
    end_s = CoreOptions().exit_timeout_s + 2 * api_server._LAST_ANSWERS_S
    assert GRACE_S[kind] >= int(sleep_s) + _config(kind).server.drain_timeout_s + end_s


@each_container
def test_memory_holds_both_tiers_of_a_16_kib_model_and_2_gib_more(kind: str) -> None:
    cache = _config(kind).engine.cache
    device_bytes = cache.device_pages * cache.page_size * 16 * 1024
    assert device_bytes == 2 * GIB
    limits = CONTAINERS[kind]["resources"]["limits"]
    assert device_bytes + cache.host_bytes + 2 * GIB <= _bytes(limits["memory"])
    assert limits == CONTAINERS[kind]["resources"]["requests"]


@each_container
def test_threads_are_the_cores_of_the_limit(kind: str) -> None:
    cores = CONTAINERS[kind]["resources"]["limits"]["cpu"]
    assert _config(kind).engine.threads == int(cores)


@each_container
def test_the_container_has_no_rights(kind: str) -> None:
    own = CONTAINERS[kind]["securityContext"]
    both = POD["securityContext"] | own if kind == "kubernetes" else own
    assert both["runAsNonRoot"] is True
    assert f"USER {both['runAsUser']}:" in (DEPLOY / "Dockerfile").read_text()
    assert both["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}


def test_every_selector_finds_the_pods() -> None:
    labels = STATEFUL_SET["spec"]["template"]["metadata"]["labels"]
    service = _manifest("kubernetes/service.yaml")
    assert service["spec"]["selector"] == labels
    assert service["metadata"]["name"] == STATEFUL_SET["spec"]["serviceName"]
    assert STATEFUL_SET["spec"]["selector"]["matchLabels"] == labels
    budget = _manifest("kubernetes/poddisruptionbudget.yaml")
    assert budget["spec"]["selector"]["matchLabels"] == labels
    policy = _manifest("kubernetes/networkpolicy.yaml")
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    monitor = _manifest("kubernetes/servicemonitor.yaml")["spec"]
    assert monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "mtserve"


def test_every_port_is_the_containers() -> None:
    name = CONTAINERS["kubernetes"]["ports"][0]["name"]
    (port,) = _manifest("kubernetes/service.yaml")["spec"]["ports"]
    assert (port["name"], port["port"], port["targetPort"]) == (name, 8000, name)
    (endpoint,) = _manifest("kubernetes/servicemonitor.yaml")["spec"]["endpoints"]
    assert endpoint["port"] == port["name"]
    assert served("GET", endpoint["path"]) is not None
    (rule,) = _manifest("kubernetes/networkpolicy.yaml")["spec"]["ingress"]
    assert [each["port"] for each in rule["ports"]] == [name]


def test_the_autoscaler_reads_a_gauge_that_the_adapter_offers() -> None:
    scaler = _manifest("kubernetes/hpa.yaml")["spec"]
    (metric,) = scaler["metrics"]
    name = metric["pods"]["metric"]["name"]
    exported = promql.exported(name)
    assert exported is not None
    assert exported.spec.kind == "gauge"
    (rule,) = _manifest("kubernetes/prometheus-adapter-values.yaml")["rules"]["custom"]
    assert rule["name"]["as"] == name
    assert rule["seriesQuery"].partition("{")[0] == name
    assert scaler["scaleTargetRef"]["kind"] == STATEFUL_SET["kind"]
    assert scaler["scaleTargetRef"]["name"] == STATEFUL_SET["metadata"]["name"]
    assert scaler["minReplicas"] == STATEFUL_SET["spec"]["replicas"]


def test_every_file_is_applied_or_named_as_extra() -> None:
    text = (FOLDER / "kustomization.yaml").read_text()
    applied = set(yaml.safe_load(text)["resources"])
    others = {path.name for path in FOLDER.glob("*.yaml")} - applied - {"kustomization.yaml"}
    assert others == {"servicemonitor.yaml", "hpa.yaml", "prometheus-adapter-values.yaml"}
    for name in others:
        assert name in text


def test_kserve_asks_for_the_runtime_that_is_there() -> None:
    model = _manifest("kserve/inferenceservice.yaml")["spec"]["predictor"]["model"]
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    (accepted,) = RUNTIME["spec"]["supportedModelFormats"]
    assert model["modelFormat"]["name"] == accepted["name"]
    assert [model["protocolVersion"]] == RUNTIME["spec"]["protocolVersions"]
    assert served("POST", "/v2/models/movies/infer") is not None
    annotations = RUNTIME["spec"]["annotations"]
    assert served("GET", annotations["prometheus.kserve.io/path"]) is not None
