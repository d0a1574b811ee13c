"""`examples/ray_serve.py` with two replicas on a local Ray cluster.

Starting Ray takes most of a minute, so this runs only when asked for: ENGINE_TEST_RAY=1.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.example_process import ExampleProcess
from tests.integration.server_process import eventually, process_is_gone

if os.environ.get("ENGINE_TEST_RAY") != "1":
    pytest.skip("slow: set ENGINE_TEST_RAY=1 to start Ray", allow_module_level=True)
pytest.importorskip("ray.serve", reason="the example needs Ray: pip install 'ray[serve]'")

pytestmark = pytest.mark.timeout(240)

NUM_USERS = 24
CANDIDATES = [9, 26, 5]
LISTENS = r"replicas listen on http://127\.0\.0\.1:(\d+)"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExampleProcess]:
    folder = tmp_path_factory.mktemp("ray")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = [
        "examples/ray_serve.py", "--replicas", "2", "--cores", "0.5",
        "--host-bytes", str(64 << 20), "--port", str(port),
    ]  # fmt: skip
    # Ray puts sockets below its folder, so that has to have a short path.
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as ray_folder,
        ExampleProcess(folder, arguments, LISTENS, ray_environment(ray_folder)) as process,
    ):
        yield process
        cores = [pid for pid in descendants(process.process.pid) if is_core(pid)]
        assert len(cores) == 2
        assert process.stop(signal.SIGINT) == 0, process.log
        eventually(lambda: all(map(process_is_gone, cores)), "the cores of both replicas end")


def ray_environment(folder: str) -> dict[str, str]:
    return {
        "HOME": folder,  # Ray keeps a token there
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(100 << 20),
    }


def descendants(pid: int) -> Iterator[int]:
    """Process ids of all processes below one."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from descendants(child)


def is_core(pid: int) -> bool:
    return b"engine.core_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def rank(cluster: ExampleProcess, user_id: str, history: list[int], **headers: str) -> Any:
    return httpx.post(
        f"{cluster.address}/v1/rank",
        json={"user_id": user_id, "history": history, "candidates": CANDIDATES},
        headers={"x-session-id": user_id, **headers},
        timeout=60,
        trust_env=False,
    )


def test_a_user_stays_on_one_replica_and_users_spread_over_both(cluster: ExampleProcess) -> None:
    users = [f"user-{number}" for number in range(NUM_USERS)]
    replicas: dict[str, set[str]] = {user: set() for user in users}
    scores: dict[str, list[list[float]]] = {}
    history = [3, 14, 15, 92]

    for round_number in range(3):
        events = history + [7 + n for n in range(round_number)]
        for user in users:
            answer = rank(cluster, user, events)
            assert answer.status_code == 200, answer.text
            replicas[user].add(answer.headers["x-replica"])
            usage = answer.json()["usage"]
            # All but the newest event was left on this user's replica by the round before.
            expected = 0 if round_number == 0 else len(events) - 1
            assert usage["device_tokens"] == expected, (user, round_number)
            scores[user] = answer.json()["scores"]

    assert all(len(seen) == 1 for seen in replicas.values())
    by_replica = [next(iter(replicas[user])) for user in users]
    assert len(set(by_replica)) == 2
    # Both replicas compute the same bits.
    assert all(scores[user] == scores[users[0]] for user in users)


def test_a_request_that_may_be_at_the_wrong_replica_is_refused(cluster: ExampleProcess) -> None:
    answer = rank(cluster, "user-1", [3], **{"x-session-id": "user-2"})

    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert "send the user id in both" in answer.json()["error"]
