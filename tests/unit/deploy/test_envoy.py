"""The Envoy example: which requests pass and where to, and limits that fit the server's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from engine.entrypoints.config import ConnectionConfig, ServerConfig
from tests.unit.deploy.served import served

DEPLOY = Path(__file__).parents[3] / "deploy"
BOOTSTRAP = yaml.safe_load((DEPLOY / "envoy/envoy.yaml").read_text())
LISTENERS = {each["name"]: each for each in BOOTSTRAP["static_resources"]["listeners"]}
CLUSTERS = {each["name"]: each for each in BOOTSTRAP["static_resources"]["clusters"]}
CLUSTER = CLUSTERS["mtserve"]


def _routes(listener: str) -> list[dict[str, Any]]:
    (chain,) = LISTENERS[listener]["filter_chains"]
    (manager,) = chain["filters"]
    (host,) = manager["typed_config"]["route_config"]["virtual_hosts"]
    routes = host["routes"]
    assert isinstance(routes, list)
    return routes


class _Asked(NamedTuple):
    method: str
    path: str
    user: str | None = None

    def matches(self, match: dict[str, Any]) -> bool:
        """Envoy's rule: the whole path, and all headers."""
        if "safe_regex" in match and not re.fullmatch(match["safe_regex"]["regex"], self.path):
            return False
        if "prefix" in match and not self.path.startswith(match["prefix"]):
            return False
        headers = {":method": self.method, "x-session-id": self.user}
        return all(_header(rule, headers[rule["name"]]) for rule in match.get("headers", ()))

    def route(self) -> dict[str, Any]:
        return next(each for each in _routes("requests") if self.matches(each["match"]))


def _header(rule: dict[str, Any], value: str | None) -> bool:
    if rule.get("present_match"):
        return value is not None
    wanted = rule["string_match"]
    pattern = wanted["safe_regex"]["regex"] if "safe_regex" in wanted else wanted["exact"]
    return value is not None and re.fullmatch(pattern, value) is not None


RANKING = (
    "/v1/rank", "/v1/retrieve", "/v1/users:prefetch",
    "/v2/models/m/infer", "/v2/models/m/versions/1/infer",
)  # fmt: skip


@pytest.mark.parametrize("path", RANKING)
def test_a_ranking_request_is_hashed_by_its_user(path: str) -> None:
    assert served("POST", path) is not None
    route = _Asked("POST", path, "u1").route()["route"]
    assert route["cluster"] == "mtserve"
    assert route["hash_policy"] == [{"header": {"header_name": ServerConfig().routing_header}}]


@pytest.mark.parametrize("path", RANKING)
def test_a_ranking_request_without_a_user_is_refused(path: str) -> None:
    assert _Asked("POST", path).route()["direct_response"]["status"] == 400


@pytest.mark.parametrize(
    "path",
    ["/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/m", "/v2/models/m/ready",
     "/v2/models/m/versions/1", "/v2/models/m/versions/1/ready"],
)  # fmt: skip
def test_metadata_and_health_pass(path: str) -> None:
    assert served("GET", path) is not None
    assert _Asked("GET", path).route()["route"]["cluster"] == "mtserve"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/metrics"), ("GET", "/v1/status"), ("DELETE", "/v1/users/u1"),
     ("POST", "/v1/cache:reset"), ("POST", "/v1/weights:load"), ("POST", "/v2/health/live"),
     ("GET", "/v1/rank"), ("POST", "/v1/rank/x")],
)  # fmt: skip
def test_nothing_else_passes(method: str, path: str) -> None:
    assert _Asked(method, path, "u1").route()["direct_response"]["status"] == 404


def test_only_what_was_not_begun_is_retried_elsewhere() -> None:
    policy = _Asked("POST", "/v1/rank", "u1").route()["route"]["retry_policy"]
    assert set(policy["retry_on"].split(",")) == {
        "connect-failure", "refused-stream", "retriable-status-codes",
    }  # fmt: skip
    assert policy["retriable_status_codes"] == [503]
    assert policy["num_retries"] == 1
    (predicate,) = policy["retry_host_predicate"]
    assert predicate["name"] == "envoy.retry_host_predicates.previous_hosts"
    assert policy["host_selection_retry_max_attempts"] > 1


def test_users_are_hashed_over_the_names_of_all_pods() -> None:
    assert CLUSTER["lb_policy"] == "RING_HASH"
    hashing = CLUSTER["common_lb_config"]["consistent_hashing_lb_config"]
    assert hashing == {"use_hostname_for_hashing": True}
    (locality,) = CLUSTER["load_assignment"]["endpoints"]
    addresses = [each["endpoint"]["address"]["socket_address"] for each in locality["lb_endpoints"]]
    stateful_set = yaml.safe_load((DEPLOY / "kubernetes/statefulset.yaml").read_text())
    scaler = yaml.safe_load((DEPLOY / "kubernetes/hpa.yaml").read_text())
    namespace = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["namespace"]
    pod, service = stateful_set["metadata"]["name"], stateful_set["spec"]["serviceName"]
    assert [each["address"] for each in addresses] == [
        f"{pod}-{index}.{service}.{namespace}.svc.cluster.local"
        for index in range(scaler["spec"]["maxReplicas"])
    ]
    assert {each["port_value"] for each in addresses} == {8000}


def test_readiness_decides_who_gets_requests() -> None:
    (check,) = CLUSTER["health_checks"]
    assert check["http_health_check"]["path"] == "/v2/health/ready"
    assert served("GET", "/v2/health/ready") is not None
    assert CLUSTER["common_lb_config"]["healthy_panic_threshold"] == {"value": 0}


def test_no_status_ejects_a_replica() -> None:
    outliers = CLUSTER["outlier_detection"]
    assert outliers["split_external_local_origin_errors"] is True
    for status in ("consecutive_5xx", "consecutive_gateway_failure", "success_rate"):
        assert outliers[f"enforcing_{status}"] == 0


def test_envoy_closes_idle_connections_before_the_server_does() -> None:
    (options,) = CLUSTER["typed_extension_protocol_options"].values()
    idle = options["common_http_protocol_options"]["idle_timeout"]
    assert int(idle.removesuffix("s")) < ConnectionConfig().keep_alive_s


def test_a_pod_that_ends_serves_until_envoy_has_noticed() -> None:
    stateful_set = yaml.safe_load((DEPLOY / "kubernetes/statefulset.yaml").read_text())
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    sleep_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    refresh_s = int(CLUSTER["dns_refresh_rate"].removesuffix("s"))
    cached_s = 5  # how long the cluster's DNS lets an answer be kept, by default
    assert refresh_s + cached_s < sleep_s


def test_only_statistics_of_the_admin_interface_are_reachable() -> None:
    assert BOOTSTRAP["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
    assert {each["match"]["path"] for each in _routes("statistics")} == {
        "/stats/prometheus", "/ready",
    }  # fmt: skip
