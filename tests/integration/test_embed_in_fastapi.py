"""`examples/embed_in_fastapi.py` as a real process: answers, errors, disconnects, the end."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.example_process import ExampleProcess
from tests.integration.server_process import FAKE_CORE, eventually, process_is_gone

pytest.importorskip("fastapi", reason="the example needs fastapi: pip install 'mtserve[test]'")

LISTENS = r"Uvicorn running on http://127\.0\.0\.1:(\d+)"
WITH_FAKE_CORE = f"""
import uvicorn
from engine import AsyncEngine, EngineConfig
from engine.config import SchedulerConfig
from examples.embed_in_fastapi import create_app
config = EngineConfig(scheduler=SchedulerConfig(max_queue_requests=1))
uvicorn.run(create_app(AsyncEngine(None, config, core_module={FAKE_CORE!r})), port=0)
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExampleProcess]:
    folder = tmp_path_factory.mktemp("fastapi")
    arguments = ["examples/embed_in_fastapi.py", "--port", "0"]
    with ExampleProcess(folder, arguments, LISTENS) as process:
        yield process


@pytest.fixture
def app_of_a_fake(tmp_path: Path) -> Iterator[ExampleProcess]:
    with ExampleProcess(tmp_path, ["-c", WITH_FAKE_CORE], LISTENS) as process:
        yield process


def post(app: ExampleProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{app.address}{path}", json=body, timeout=60, trust_env=False)


def get(app: ExampleProcess, path: str) -> httpx.Response:
    return httpx.get(f"{app.address}{path}", timeout=60, trust_env=False)


def test_a_users_second_request_finds_the_history_on_the_device(app: ExampleProcess) -> None:
    history = [3, 14, 15, 92, 65, 35]
    first = post(app, "/rank", user_id="u1", history=history, candidates=[9, 26, 5])
    second = post(app, "/rank", user_id="u1", history=[*history, 8], candidates=[9, 26, 5])
    other = post(app, "/rank", user_id=77, history=[*history, 8], candidates=[9, 26, 5])

    assert (first.status_code, second.status_code, other.status_code) == (200, 200, 200)
    assert first.json()["usage"]["device_tokens"] == 0
    assert second.json()["usage"] == {
        "history_length": 7, "device_tokens": 6, "host_tokens": 0, "computed_tokens": 1,
    }  # fmt: skip
    assert second.json()["scores"] == other.json()["scores"]
    assert [len(row) for row in first.json()["scores"]] == [1, 1, 1]


def test_retrieve_gives_the_best_items_in_order(app: ExampleProcess) -> None:
    answer = post(app, "/retrieve", user_id="u2", history=[3, 14], top_k=4).json()

    assert len(set(answer["items"])) == 4
    assert answer["item_scores"] == sorted(answer["item_scores"], reverse=True)


def test_errors_of_the_engine_have_their_status_and_code(app: ExampleProcess) -> None:
    empty = post(app, "/rank", user_id="u3", history=[3], candidates=[])
    late = post(app, "/rank", user_id="u3", history=[3], candidates=[9], deadline_ms=0.0001)
    misspelt = post(app, "/rank", user_id="u3", past=[3], candidates=[9])

    assert (empty.status_code, empty.json()["code"]) == (400, "invalid_request")
    assert "candidates is empty" in empty.json()["error"]
    assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")
    assert misspelt.status_code == 422


def test_health_and_metrics_are_there(app: ExampleProcess) -> None:
    post(app, "/rank", user_id="u4", history=[3], candidates=[9])

    assert get(app, "/live").json() == {"live": True}
    assert get(app, "/ready").json() == {"ready": True, "reason": None}
    page = get(app, "/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert 'mtserve_requests_total{outcome="ok",task="rank"}' in page.text


def test_a_client_that_leaves_cancels_its_request(app_of_a_fake: ExampleProcess) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{app_of_a_fake.address}/rank",
            json={"user_id": "hold", "history": [1], "candidates": [2]},
            timeout=1.0,
            trust_env=False,
        )

    cancelled = 'mtserve_requests_total{outcome="cancelled",task="rank"} 1.0'
    eventually(lambda: cancelled in get(app_of_a_fake, "/metrics").text, "cancelled")


def test_a_full_queue_says_when_to_come_again(app_of_a_fake: ExampleProcess) -> None:
    held = json.dumps({"user_id": "hold", "history": [1], "candidates": [2]})
    connection = http.client.HTTPConnection(app_of_a_fake.address.removeprefix("http://"))
    with contextlib.closing(connection):
        connection.request("POST", "/rank", held, {"content-type": "application/json"})
        eventually(
            lambda: "mtserve_requests_waiting 1.0" in get(app_of_a_fake, "/metrics").text, "held"
        )
        answer = post(app_of_a_fake, "/rank", user_id="u", history=[1], candidates=[2])

    assert (answer.status_code, answer.json()["code"]) == (429, "overloaded")
    assert (answer.headers["retry-after"], answer.json()["limit"]) == ("2", 1)


def test_when_the_core_dies_requests_end_typed_and_readiness_goes(
    app_of_a_fake: ExampleProcess,
) -> None:
    answer = post(app_of_a_fake, "/rank", user_id="exit", history=[1], candidates=[2])

    assert (answer.status_code, answer.json()["code"]) == (503, "engine_dead")
    readiness = get(app_of_a_fake, "/ready")
    assert readiness.status_code == 503
    assert readiness.json()["ready"] is False
    assert get(app_of_a_fake, "/metrics").status_code == 200
    later = post(app_of_a_fake, "/rank", user_id="u", history=[1], candidates=[2])
    assert (later.status_code, later.json()["code"]) == (503, "engine_dead")


def test_sigterm_ends_the_application_and_its_core(tmp_path: Path) -> None:
    arguments = ["examples/embed_in_fastapi.py", "--port", "0"]
    with ExampleProcess(tmp_path, arguments, LISTENS) as app:
        (core_pid,) = app.children()
        post(app, "/rank", user_id="u1", history=[3], candidates=[9])

        status = app.stop(signal.SIGTERM)

        assert process_is_gone(core_pid)
        assert status in (0, -signal.SIGTERM)  # uvicorn passes the signal on when it has ended
        assert "Application shutdown complete" in app.log
        assert "Traceback" not in app.log
