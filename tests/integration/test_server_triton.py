"""HTTP as a public client sends it, JSON and binary tensors mixed, over a fake core."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from tests.integration.server_process import ServerProcess

TYPES = {"INT64": np.int64, "FP32": np.float32, "BYTES": np.object_}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), fake=True) as running:
        yield running.until_ready()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[triton.InferenceServerClient]:
    connected = triton.InferenceServerClient(server.address)
    yield connected
    connected.close()


def tensor(name: str, values: Any, datatype: str, *, binary: bool) -> triton.InferInput:
    array = np.array(values, TYPES[datatype])
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def test_binary_tensors_are_announced(client: triton.InferenceServerClient) -> None:
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]


@pytest.mark.parametrize(
    ("binary_in", "binary_out"), list(itertools.product([False, True, None], repeat=2))
)
def test_any_mix_of_json_and_binary_is_answered_alike(
    client: triton.InferenceServerClient, binary_in: bool | None, binary_out: bool | None
) -> None:
    """None stands for every other one."""
    ways = itertools.cycle([False, True])

    def way(wanted: bool | None) -> bool:
        return next(ways) if wanted is None else wanted

    inputs = [
        tensor(name, values, datatype, binary=way(binary_in))
        for name, values, datatype in (
            ("candidate_mood", [[1.5, 2], [3, 4], [5, 6]], "FP32"),
            ("user_id", ["us\u00e9r"], "BYTES"),
            ("history", [1, 2], "INT64"),
            ("history_action", [1], "INT64"),
            ("candidates", [4, 9, 4], "INT64"),
            ("context", [7], "INT64"),
        )
    ]
    outputs = [
        triton.InferRequestedOutput(name, binary_data=way(binary_out))
        for name in ("items", "user_embedding", "scores", "item_scores")
    ]
    answer = client.infer(
        "fake", inputs, outputs=outputs, request_id="r", parameters={"topk": 2},
        timeout=30_000_000, priority=4,
    )  # fmt: skip
    assert answer.get_response()["id"] == "r"
    assert answer.as_numpy("scores").tolist() == [
        [3004.0, 2996.0], [3009.0, 2991.0], [3004.0, 2996.0],
    ]  # fmt: skip
    assert answer.as_numpy("items").tolist() == [9, 4]
    assert answer.as_numpy("item_scores").tolist() == [3009.0, 3004.0]
    assert answer.as_numpy("user_embedding").tolist() == [3000.0] * 4


def test_a_client_that_names_no_output_gets_all_as_bytes(
    client: triton.InferenceServerClient,
) -> None:
    inputs = [
        tensor("user_id", [5], "INT64", binary=True),
        tensor("history", [], "INT64", binary=True),
    ]
    answer = client.infer("fake", inputs, parameters={"topk": 3})
    assert answer.as_numpy("items").tolist() == [0, 1, 2]
    described = answer.get_response()["outputs"]
    assert [one["parameters"] for one in described] == [
        {"binary_data_size": 24}, {"binary_data_size": 12},
    ]  # fmt: skip


def test_an_answer_with_bytes_has_the_headers_of_the_extension(server: ServerProcess) -> None:
    content = json.dumps(
        {
            "inputs": [
                {"name": "user_id", "datatype": "INT64", "shape": [1], "data": [5]},
                {"name": "history", "datatype": "INT64", "shape": [1],
                 "parameters": {"binary_data_size": 8}},
                {"name": "candidates", "datatype": "INT64", "shape": [1], "data": [4]},
            ],
            "outputs": [{"name": "scores", "parameters": {"binary_data": True}}],
        }
    ).encode()  # fmt: skip
    reply = server.post(
        "/v2/models/fake/infer",
        content + struct.pack("<q", 2),
        {"Inference-Header-Content-Length": str(len(content))},
    )
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/octet-stream"
    length = int(reply.headers["inference-header-content-length"])
    (output,) = json.loads(reply.body[:length])["outputs"]
    assert output["parameters"] == {"binary_data_size": 8}
    assert reply.body[length:] == struct.pack("<2f", 2004.0, 1996.0)


def test_errors_name_the_input_and_its_numbers(
    server: ServerProcess, client: triton.InferenceServerClient
) -> None:
    with pytest.raises(triton.InferenceServerException, match=r"'candidates'.*FP32.*INT64"):
        client.infer(
            "fake",
            [
                tensor("user_id", ["u"], "BYTES", binary=True),
                tensor("history", [1], "INT64", binary=True),
                tensor("candidates", [1], "FP32", binary=True),
            ],
        )
    content = json.dumps(
        {
            "inputs": [
                {"name": "history", "datatype": "INT64", "shape": [2],
                 "parameters": {"binary_data_size": 8}},
            ]
        }
    ).encode()  # fmt: skip
    reply = server.post(
        "/v2/models/fake/infer",
        content + bytes(8),
        {"Inference-Header-Content-Length": str(len(content))},
    )
    assert (reply.status, reply.body["code"]) == (400, "invalid_request")
    assert (reply.body["limit"], reply.body["value"]) == (16, 8)
    assert "'history' has 8 bytes" in reply.body["error"]
