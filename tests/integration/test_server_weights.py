"""Weights versions and users over HTTP, against a real server with real models."""

import httpx
import msgspec
import pytest
from engine_models import CONFIGS

from engine.config import AttentionConfig, CacheConfig, EngineConfig
from engine.engine import Engine
from engine.testing.models import save_random_model
from tests.integration.server_process import ServerProcess

HISTORY = [10 * item + 1 for item in (3, 1, 4, 1, 5, 9, 2, 6)]
CANDIDATES = [11, 21, 31]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for seed, version in enumerate(("monday", "tuesday")):
        config = msgspec.structs.replace(CONFIGS["append"], weights_version=version)
        save_random_model(root / version, config, seed=seed)
    save_random_model(
        root / "other",
        msgspec.structs.replace(CONFIGS["append_bf16"], name="append", weights_version="other"),
    )
    (root.parent / "outside").mkdir(exist_ok=True)
    (root / "ring").symlink_to("ring")
    return root


@pytest.fixture(scope="module")
def client(models, tmp_path_factory):
    flags = ("--model", str(models / "monday"), "--device-pages", "64")
    with ServerProcess(tmp_path_factory.mktemp("server"), *flags) as server:
        server.until_ready()
        with httpx.Client(base_url=f"http://{server.address}", timeout=60) as client:
            yield client


@pytest.fixture(scope="module")
def expected(models):
    scores = {}
    for version in ("monday", "tuesday"):
        config = EngineConfig(
            cache=CacheConfig(tiers="off", device_pages=64), attention=AttentionConfig()
        )
        with Engine.from_model_dir(str(models / version), config) as engine:
            answer = engine.rank(user_id="x", history=HISTORY, candidates=CANDIDATES)
            scores[version] = answer.scores.tolist()
    return scores


def rank(client, user="ann", **options):
    body = {"user_id": user, "history": HISTORY, "candidates": CANDIDATES}
    answer = client.post("/v1/rank", json={**body, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def infer(client, version):
    return client.post(
        f"/v2/models/append/versions/{version}/infer",
        json={
            "inputs": [
                {"name": "user_id", "datatype": "BYTES", "shape": [1], "data": ["ann"]},
                {"name": "history", "datatype": "INT64", "shape": [8], "data": HISTORY},
                {"name": "candidates", "datatype": "INT64", "shape": [3], "data": CANDIDATES},
            ]
        },
    )


def test_weights_are_loaded_activated_rolled_back_and_retired(client, expected):
    first = rank(client)
    assert first["usage"]["weights_version"] == "monday"
    assert first["scores"] == expected["monday"]

    loaded = client.post("/v1/weights:load", json={"path": "tuesday"})
    assert loaded.status_code == 200, loaded.text
    status = loaded.json()
    assert (status["version"], status["state"], status["share"]) == ("tuesday", "standby", 0.5)
    assert rank(client)["usage"]["weights_version"] == "monday"
    assert rank(client, weights_version="tuesday")["scores"] == expected["tuesday"]
    assert infer(client, "tuesday").json()["parameters"]["weights_version"] == "tuesday"
    assert client.get("/v2/models/append/versions/tuesday/ready").status_code == 200
    metadata = client.get("/v2/models/append").json()
    assert metadata["versions"] == ["monday", "tuesday"]

    switched = client.post("/v1/weights:activate", json={"version": "tuesday"}).json()
    assert (switched["active"], switched["previous"]) == ("tuesday", "monday")
    second = rank(client)
    assert second["usage"]["weights_version"] == "tuesday"
    assert second["scores"] == expected["tuesday"]

    client.post("/v1/weights:activate", json={"version": "monday"})
    back = rank(client)
    assert back["scores"] == expected["monday"]
    assert back["usage"]["computed_tokens"] == 0, "the old state is still there"

    retired = client.post("/v1/weights:retire", json={"version": "tuesday"}).json()
    assert retired["version"] == "tuesday" and retired["device_tokens"] == 8
    listed = client.get("/v1/weights:list").json()
    assert [status["version"] for status in listed["versions"]] == ["monday"]
    assert infer(client, "tuesday").status_code == 404


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("missing", "is no directory"),
        ("../outside", "outside of weights_root"),
        ("/etc", "outside of weights_root"),
        ("nul\0byte", "'nul\\x00byte' is no path"),
        ("x" * 300, "is no directory"),
        ("ring", "is no path"),
        ("other", "dtype is bfloat16, the running version has float32"),
        ("monday", "is loaded already"),
    ],
)
def test_weights_that_cannot_be_served_are_refused_and_named(client, path, part):
    answer = client.post("/v1/weights:load", json={"path": path})
    assert answer.status_code == 400
    assert answer.json()["code"] == "config_error" and part in answer.json()["error"]
    assert rank(client)["usage"]["weights_version"] == "monday"


def test_users_are_described_listed_and_forgotten(client):
    client.post("/v1/cache:reset")
    rank(client, "a/b")
    rank(client, "cid")
    described = client.get("/v1/users/a%2Fb").json()
    assert described["user_id"] == "a/b"
    (state,) = described["states"]
    assert (state["weights_version"], state["device_tokens"]) == ("monday", 8)
    assert client.get("/v1/users/nobody").json()["states"] == []

    listed = client.get("/v1/users", params={"limit": 1, "tier": "device"}).json()
    assert [state["user_id"] for state in listed["states"]] == ["cid"]
    assert listed["total"] == 2

    forgotten = client.delete("/v1/users/a%2Fb", params={"namespace": ""}).json()
    assert forgotten["device_tokens"] == 8
    reset = client.post("/v1/cache:reset").json()
    assert (reset["states"], reset["device_tokens"]) == (1, 8)
    assert client.get("/v1/users").json()["total"] == 0


@pytest.mark.parametrize(
    ("query", "part"),
    [
        ("limit=0", "limit is '0'"),
        ("limit=1001", "give 1 to 1000"),
        (f"limit={'9' * 5000}", "give 1 to 1000"),
        ("tier=disk", "tier is 'disk'"),
        ("who=me", "the query has 'who'"),
        ("limit=1&limit=2", "2 times"),
        ("%ff=1", "cannot be read"),
    ],
)
def test_query_that_cannot_be_read_names_what_is_wrong(client, query, part):
    answer = client.get(f"/v1/users?{query}")
    assert answer.status_code == 400 and part in answer.json()["error"]
