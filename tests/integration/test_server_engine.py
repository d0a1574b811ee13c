"""The real server over the real engine and the built-in model, driven by a public client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from engine.async_engine import AsyncEngine
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from tests.integration.server_process import ServerProcess, eventually, process_is_gone

MODEL = "builtin-hstu"
SMALL = ["--device-pages", "256", "--page-size", "16", "--chunk-size", "64",
         "--host-bytes", "67108864"]  # fmt: skip
CONFIG = EngineConfig(
    cache=CacheConfig(device_pages=256, page_size=16, chunk_size=64, host_bytes=1 << 26), threads=1
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    flags = [*SMALL, "--threads", "1", "--max-queue-requests", "200"]
    with ServerProcess(folder, *flags) as running:
        yield running.until_ready()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[triton.InferenceServerClient]:
    connected = triton.InferenceServerClient(server.address)
    yield connected
    connected.close()


def int64(name: str, values: list[int]) -> triton.InferInput:
    tensor = triton.InferInput(name, [len(values)], "INT64")
    tensor.set_data_from_numpy(np.array(values, np.int64), binary_data=False)
    return tensor


def user(user_id: str) -> triton.InferInput:
    tensor = triton.InferInput("user_id", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([user_id], dtype=object), binary_data=False)
    return tensor


def wanted(*names: str) -> list[triton.InferRequestedOutput]:
    return [triton.InferRequestedOutput(name, binary_data=False) for name in names]


def test_the_client_sees_the_model(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "random-1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "mtserve"
    assert client.get_model_metadata(MODEL)["parameters"]["is_random"] is True


def test_the_client_ranks_and_retrieves(client: triton.InferenceServerClient) -> None:
    history, candidates = [5, 9, 2, 7, 7, 1], [11, 3, 3, 800]
    with Engine.from_model_dir(None, CONFIG) as engine:
        ranked = engine.rank(user_id="t", history=history, candidates=candidates, top_k=2)
        retrieved = engine.retrieve(user_id="t", history=history, top_k=5, exclude_history=True)
    inputs = [user("t1"), int64("history", history), int64("candidates", candidates)]
    answer = client.infer(
        MODEL, inputs, request_id="r1", outputs=wanted("scores", "items", "item_scores"),
        priority=1, timeout=30_000_000, parameters={"topk": 2},
    )  # fmt: skip
    assert ranked.scores is not None
    np.testing.assert_array_equal(answer.as_numpy("scores"), ranked.scores)
    np.testing.assert_array_equal(answer.as_numpy("items"), ranked.items)
    np.testing.assert_array_equal(answer.as_numpy("item_scores"), ranked.item_scores)
    content = answer.get_response()
    assert content["id"] == "r1"
    assert content["parameters"]["computed_tokens"] == content["parameters"]["history_length"] == 6

    again = client.infer(MODEL, inputs)  # asks for binary outputs; JSON is an answer too
    np.testing.assert_array_equal(again.as_numpy("scores"), ranked.scores)
    assert again.get_response()["parameters"]["device_tokens"] == 6

    answer = client.infer(
        MODEL, [user("t2"), int64("history", history)],
        outputs=wanted("items", "item_scores", "user_embedding"),
        parameters={"topk": 5, "exclude_history": True},
    )  # fmt: skip
    np.testing.assert_array_equal(answer.as_numpy("items"), retrieved.items)
    np.testing.assert_array_equal(answer.as_numpy("item_scores"), retrieved.item_scores)
    assert answer.as_numpy("user_embedding").ndim == 1


def test_the_client_sends_only_what_is_new(client: triton.InferenceServerClient) -> None:
    history = [(7 * event) % 500 for event in range(40)]
    candidates = int64("candidates", [11, 3])
    first = client.infer(
        MODEL, [user("d1"), int64("history", history), candidates], outputs=wanted("scores")
    )
    said = first.get_response()["parameters"]
    assert said["base_length"] == 32
    base = {"base_length": 32, "base_fingerprint": said["fingerprint"]}
    history += [9, 8]
    new = int64("history", history[32:])
    delta = client.infer(
        MODEL, [user("d1"), new, candidates], outputs=wanted("scores"), parameters=base
    )
    whole = client.infer(
        MODEL, [user("d2"), int64("history", history), candidates], outputs=wanted("scores")
    )
    np.testing.assert_array_equal(delta.as_numpy("scores"), whole.as_numpy("scores"))
    usage = delta.get_response()["parameters"]
    assert (usage["device_tokens"], usage["computed_tokens"]) == (40, 2)
    with pytest.raises(triton.InferenceServerException, match="send the whole history") as error:
        client.infer(
            MODEL, [user("d3"), new, candidates], outputs=wanted("scores"), parameters=base
        )
    assert error.value.status() == "409"


def test_the_client_gets_typed_errors(client: triton.InferenceServerClient) -> None:
    with pytest.raises(triton.InferenceServerException, match="history_typo"):
        client.infer(
            MODEL,
            [user("e"), int64("history", [1]), int64("history_typo", [1])],
            outputs=wanted("items"),
        )
    with pytest.raises(triton.InferenceServerException, match="999999999"):
        client.infer(
            MODEL,
            [user("e"), int64("history", [1]), int64("candidates", [999_999_999])],
            outputs=wanted("scores"),
        )
    binary = triton.InferInput("history", [1], "INT64")
    binary.set_data_from_numpy(np.array([1]))
    with pytest.raises(triton.InferenceServerException, match="binary"):
        client.infer(MODEL, [user("e"), binary], outputs=wanted("items"))


async def _rank_once(port: int, number: int) -> tuple[int, list[float]]:
    """Status, and the scores of one request over a connection of its own."""
    body = json.dumps(
        {"user_id": f"c{number}", "history": [number % 50 + 1, 2, 3], "candidates": [4, 5]}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}connection: close\r\n\r\n{body}".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, content = answer.decode().partition("\r\n\r\n")
    status = int(head.split()[1])
    if status == 429:
        assert "retry-after:" in head.lower()
    scores = json.loads(content).get("scores", [])
    return status, [row[0] for row in scores]


async def test_a_thousand_concurrent_requests_get_answers_or_429(server: ServerProcess) -> None:
    replies = await asyncio.wait_for(
        asyncio.gather(*(_rank_once(server.port, number) for number in range(1000))), 100
    )
    statuses = Counter(status for status, _ in replies)
    assert set(statuses) <= {200, 429}
    assert statuses[200] >= 200
    by_history: dict[int, set[tuple[float, ...]]] = {}
    for number, (status, scores) in enumerate(replies):
        if status == 200:
            by_history.setdefault(number % 50, set()).add(tuple(scores))
    # The same history scores the same for every user, whatever it was batched with.
    assert all(len(scores) == 1 for scores in by_history.values())
    text = server.get("/metrics").body.decode()
    overloaded = 'mtserve_requests_total{outcome="overloaded",task="rank"}'
    if statuses[429]:
        assert f"{overloaded} {float(statuses[429])}" in text


def test_killing_the_core_under_load_loses_no_request(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, *SMALL, "--threads", "1") as server:
        server.until_ready()

        async def load() -> list[tuple[int, list[float]]]:
            tasks = [asyncio.ensure_future(_rank_once(server.port, n)) for n in range(300)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert done
            os.kill(server.core_pid, signal.SIGKILL)
            return await asyncio.wait_for(asyncio.gather(*tasks), 100)

        statuses = Counter(status for status, _ in asyncio.run(load()))
        assert set(statuses) <= {200, 503}
        assert statuses[503] > 0
        assert server.wait() == 1


def test_sigterm_under_load_answers_what_was_taken(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, *SMALL, "--threads", "1") as server:
        server.until_ready()

        async def load() -> list[tuple[int, list[float]]]:
            tasks = [asyncio.ensure_future(_rank_once(server.port, n)) for n in range(200)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            server.send_signal(signal.SIGTERM)
            return await asyncio.wait_for(asyncio.gather(*tasks), 100)

        statuses = Counter(status for status, _ in asyncio.run(load()))
        assert set(statuses) <= {200, 503}
        assert statuses[200] > 0
        assert server.wait() == 0
        eventually(lambda: process_is_gone(server.core_pid), "the core is gone")


async def test_async_engine_gives_the_synchronous_engine_s_answers() -> None:
    histories = [[number, 3, number + 7] * 10 for number in range(1, 9)]
    with Engine.from_model_dir(None, CONFIG) as engine:
        expected = [
            engine.rank(user_id=f"a{n}", history=history, candidates=[1, 2, 3]).scores
            for n, history in enumerate(histories)
        ]
    async with AsyncEngine.from_model_dir(None, CONFIG) as engine:
        assert engine.info.is_random
        answers = await asyncio.gather(
            *(
                engine.rank(user_id=f"a{n}", history=history, candidates=[1, 2, 3])
                for n, history in enumerate(histories)
            )
        )
        for answer, scores in zip(answers, expected, strict=True):
            np.testing.assert_array_equal(answer.scores, scores)
        base = answers[1].usage
        delta = await engine.rank(
            user_id="a1",
            history=histories[1][base.base_length :],
            candidates=[1, 2, 3],
            base_length=base.base_length,
            base_fingerprint=base.fingerprint,
        )
        assert (base.base_length, delta.usage.device_tokens) == (16, 30)
        np.testing.assert_array_equal(delta.scores, expected[1])
        warm = await engine.prefetch(user_id="a0")
        assert warm.usage.device_tokens == 30
        forgotten = await engine.forget("a0")
        assert forgotten.device_tokens == 30
        cold = await engine.rank(user_id="a0", history=histories[0], candidates=[1, 2, 3])
        assert cold.usage.computed_tokens == 30
        np.testing.assert_array_equal(cold.scores, expected[0])
