"""Infer bodies and answers, as tables."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from engine.entrypoints.oip import decode_infer, encode_infer
from engine.entrypoints.oip_metadata import model_metadata
from engine.entrypoints.protocol import to_json
from engine.errors import InvalidRequest
from engine.types import CacheMode, FeatureInfo, ModelInfo, Response, Reuse, Task, Usage

USER = {"name": "user_id", "datatype": "BYTES", "shape": [1], "data": ["u1"]}
HISTORY = {"name": "history", "datatype": "INT64", "shape": [3], "data": [3, 1, 2]}
CANDIDATES = {"name": "candidates", "datatype": "INT64", "shape": [2], "data": [7, 7]}

FEATURES = (
    FeatureInfo(name="item", dtype="int64", dim=0, on_history=True, on_candidates=True),
    FeatureInfo(name="action", dtype="int64", dim=0, on_history=True, on_candidates=False),
    FeatureInfo(name="mood", dtype="float32", dim=2, on_history=True, on_candidates=True),
)
INFO = ModelInfo(
    name="m", weights_version="7", dtype="float32", tasks=(Task.RANK, Task.RETRIEVE),
    score_names=("click",), features=FEATURES, context_features=("country", "age"),
    reads_query_time=False, embedding_dim=4, max_history_events=10, max_history_tokens=20,
    max_batch_tokens=64, keep_stride=1, reuse=Reuse.APPEND, reuse_reason="causal",
    backend="torch", exactness="bitwise", cache_tiers="tiered", page_size=8, chunk_size=32,
    token_bytes=512, sample_items=(3, 1),
)  # fmt: skip


def tensor(name: str, data: Any, datatype: str = "INT64", shape: Any = None) -> dict[str, Any]:
    shape = [len(data)] if shape is None else shape
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def body(*inputs: dict[str, Any], **members: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **members}).encode()


def decode(content: bytes) -> Any:
    return decode_infer(content, INFO, request_id="made", arrival_s=100.0)


def test_a_rank_body_is_decoded() -> None:
    call = decode(
        body(
            USER,
            HISTORY,
            CANDIDATES,
            tensor("history_action", [1, 0]),
            tensor("history_mood", [0.5, 1, 2, 3, 4, 5.5], "FP32", [3, 2]),
            tensor("candidate_mood", [[1, 2], [3, 4]], "FP32", [2, 2]),
            tensor("context", [9]),
            id="abc",
            parameters={
                "query_time": 12,
                "namespace": "ns",
                "topk": 1,
                "timeout": 250_000,
                "priority": 3,
                "cache": "bypass",
                "history_start": 8,
                "ignore_extra": True,
                "binary_data_output": True,
            },
            outputs=[{"name": "scores"}, {"name": "user_embedding"}],
        )
    )
    request = call.request
    assert (call.id, request.request_id) == ("abc", "abc")
    assert call.output_names == ("scores", "user_embedding")
    assert (request.task, request.user_id, request.namespace) == (Task.RANK, "u1", "ns")
    assert request.history["item"].tolist() == [3, 1, 2]
    assert request.history["action"].tolist() == [1, 0]
    assert request.history["mood"].dtype == np.float32
    assert request.history["mood"].tolist() == [[0.5, 1.0], [2.0, 3.0], [4.0, 5.5]]
    assert request.candidates["item"].tolist() == [7, 7]
    assert request.candidates["mood"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert request.context.tolist() == [9]
    assert (request.query_time, request.top_k, request.priority) == (12, 1, 3)
    assert (request.arrival_s, request.deadline_s) == (100.0, 100.25)
    assert (request.cache, request.history_start) == (CacheMode.BYPASS, 8)
    assert request.ignore_extra
    assert request.return_user_embedding


def test_delta_request_is_decoded() -> None:
    base = {"base_length": 32, "base_fingerprint": "0f" * 16}
    request = decode(body(USER, HISTORY, CANDIDATES, parameters=base)).request
    assert (request.base_length, request.base_fingerprint) == (32, "0f" * 16)


def test_what_the_model_does_not_read_passes_with_ignore_extra() -> None:
    call = decode(
        body(USER, HISTORY, tensor("history_time", [1, 2, 3]), parameters={"ignore_extra": True})
    )
    assert call.request.history["time"].tolist() == [1, 2, 3]


def test_without_candidates_it_is_retrieve_of_ten() -> None:
    call = decode(body(USER, HISTORY, parameters={"exclude_history": True, "deadline_ms": 5}))
    assert call.request.task is Task.RETRIEVE
    assert call.request.top_k == 10
    assert call.request.exclude_history
    assert call.request.request_id == "made"
    assert call.id is None
    assert call.request.deadline_s == 100.005


@pytest.mark.parametrize(
    ("user", "text"),
    [
        (USER, "u1"),
        (tensor("user_id", [123]), "123"),
        (tensor("user_id", ["123"], "BYTES"), "123"),
        (tensor("user_id", [-5]), "-5"),
    ],
)
def test_user_ids_are_text(user: dict[str, Any], text: str) -> None:
    assert decode(body(user, HISTORY)).request.user_id == text


def test_an_empty_history_is_legal() -> None:
    call = decode(body(USER, tensor("history", []), CANDIDATES))
    assert call.request.history["item"].shape == (0,)
    assert call.request.history["item"].dtype == np.int64


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"{", "JSON"),
        (b"[]", "body"),
        (b'{"inputs": [NaN]}', "JSON"),
        (b'{"inputs": [{"data": ' + b"[" * 100_000, "nested"),
        (body(HISTORY), "user_id"),
        (body(USER), "history"),
        (body(USER, CANDIDATES), "history"),
        (body(USER, HISTORY, HISTORY), "'history' is there twice"),
        (body(USER, HISTORY, tensor("histori", [1])), "'histori'"),
        (body(USER, HISTORY, tensor("history_", [1])), "'history_'"),
        (body(USER, HISTORY, tensor("history_time", [1, 2, 3])), "'history_time' is not read"),
        (body(USER, HISTORY, CANDIDATES, tensor("candidate_action", [1, 2])), "candidate_action"),
        (body(USER, HISTORY, tensor("history_item", [1, 2, 3])), "'history_item'"),
        (body(USER, HISTORY, tensor("candidate_mood", [1], "FP32")), "candidates"),
        (body(USER, tensor("history_action", [1])), "history"),
        (body(USER, tensor("history", [1, 2], shape=[3])), "'history'.*2 values"),
        (body(USER, tensor("history", [1, 2], shape=[1, 2])), r"'history'.*\[1, 2\]"),
        (body(USER, tensor("history", [1, 2], shape=[-1, -2])), "'history'"),
        (body(USER, tensor("history", [1, 2], "INT32")), "'history'.*INT32"),
        (body(USER, tensor("history", [1.5])), "'history'.*float"),
        (body(USER, tensor("history", [True])), "'history'.*bool"),
        (body(USER, tensor("history", ["1"])), "'history'.*str"),
        (body(USER, tensor("history", [2**63])), "'history'.*64 bits"),
        (body(USER, HISTORY, tensor("history_action", [1])), "history.action"),
        (body(USER, HISTORY, tensor("history_mood", [1, 2], "FP32", [2])), "history.mood"),
        (body(USER, HISTORY, tensor("history_mood", [1e300] * 3, "FP32")), "history_mood"),
        (body(USER, HISTORY, tensor("history_mood", [True] * 3, "FP32")), "history_mood"),
        (body(USER, HISTORY, tensor("history_mood", [[1, 2], [3]], "FP32", [3])), "mood"),
        (body(USER, HISTORY, tensor("history_mood", [], "FP32", [0, 2**62])), "mood.*too large"),
        (body(USER, HISTORY, tensor("history_mood", [], "FP32", [0, 2**80])), "mood.*too large"),
        (body(USER, HISTORY, tensor("candidates", [])), "candidates"),
        (body(tensor("user_id", ["a", "b"], "BYTES"), HISTORY), "user_id"),
        (body(tensor("user_id", [""], "BYTES"), HISTORY), "user_id"),
        (body(tensor("user_id", [1.0], "FP32"), HISTORY), "user_id"),
        (body(USER, HISTORY, parameters={"topk": 0}), "topk"),
        (body(USER, HISTORY, parameters={"topk": True}), "topk"),
        (body(USER, HISTORY, parameters={"tokp": 1}), "tokp"),
        (body(USER, HISTORY, parameters={"cache": "maybe"}), "cache"),
        (body(USER, HISTORY, parameters={"priority": 1.5}), "priority"),
        (body(USER, HISTORY, parameters={"deadline_ms": 0}), "deadline_ms"),
        (body(USER, HISTORY, parameters={"query_time": 2**70}), "query_time"),
        (body(USER, HISTORY, parameters={"timeout": 10**320}), "timeout"),
        (body(USER, HISTORY, parameters={"task": "generate"}), "task"),
        (body(USER, HISTORY, parameters={"task": "rank"}), "candidates"),
        (body(USER, HISTORY, CANDIDATES, parameters={"task": "retrieve"}), "candidates"),
        (body(USER, HISTORY, CANDIDATES, parameters={"exclude_history": True}), "exclude"),
        (body(USER, HISTORY, parameters={"history_start": -1}), "history_start"),
        (body(USER, HISTORY, outputs=[{"name": "scores"}]), "'scores'"),
        (body(USER, HISTORY, CANDIDATES, outputs=[{"name": "items"}]), "'items'"),
        (body(USER, HISTORY, outputs=[{"name": "x", "y": 1}]), "`y`"),
        (body(USER, {**HISTORY, "parameters": {"binary_data_size": 24}}), "binary"),
        (body(USER, {"name": "history", "datatype": "INT64", "shape": [3]}), "'history'.*data"),
        (body(USER, HISTORY, more=1), "more"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(content: bytes, names: str) -> None:
    with pytest.raises(InvalidRequest, match=names):
        decode(content)


USAGE = Usage(
    device_tokens=2, host_tokens=3, computed_tokens=4, history_length=9, base_length=8,
    fingerprint="ab", weights_version="7", reuse=Reuse.EXACT, queue_us=1, onload_wait_us=2,
    run_us=3,
)  # fmt: skip


def test_an_answer_is_encoded_as_tensors() -> None:
    call = decode(body(USER, HISTORY, CANDIDATES, id="abc", parameters={"topk": 1}))
    response = Response(
        request_id="abc",
        usage=USAGE,
        scores=np.array([[0.5, 1.0], [0.1, 2.0]], np.float32),
        items=np.array([7]),
        item_scores=np.array([0.5], np.float32),
    )
    answer = json.loads(to_json(encode_infer(call, response, "m")))
    assert answer == {
        "model_name": "m",
        "model_version": "7",
        "id": "abc",
        "parameters": {
            "device_tokens": 2, "host_tokens": 3, "computed_tokens": 4, "history_length": 9,
            "base_length": 8, "fingerprint": "ab", "weights_version": "7", "reuse": "exact",
            "queue_us": 1, "onload_wait_us": 2, "run_us": 3,
        },
        "outputs": [
            {
                "name": "scores", "datatype": "FP32", "shape": [2, 2],
                "data": [0.5, 1.0, 0.10000000149011612, 2.0],
            },
            {"name": "items", "datatype": "INT64", "shape": [1], "data": [7]},
            {"name": "item_scores", "datatype": "FP32", "shape": [1], "data": [0.5]},
        ],
    }  # fmt: skip


def test_only_the_outputs_asked_for_are_sent_in_their_order() -> None:
    asked = [{"name": "item_scores", "parameters": {"binary_data": True}}, {"name": "items"}]
    call = decode(body(USER, HISTORY, outputs=asked))
    response = Response(
        request_id="r", usage=USAGE, items=np.array([7]), item_scores=np.zeros(1, np.float32)
    )
    answer = encode_infer(call, response, "m")
    assert [output.name for output in answer.outputs] == ["item_scores", "items"]
    assert answer.id is None


def test_metadata_lists_what_the_model_declares() -> None:
    metadata = model_metadata(INFO, ["7", "8"])
    assert [(one.name, one.datatype, one.shape) for one in metadata.inputs] == [
        ("user_id", "BYTES", [1]),
        ("history", "INT64", [-1]),
        ("history_action", "INT64", [-1]),
        ("history_mood", "FP32", [-1, 2]),
        ("candidate_mood", "FP32", [-1, 2]),
        ("context", "INT64", [2]),
        ("candidates", "INT64", [-1]),
    ]
    assert [(one.name, one.datatype, one.shape) for one in metadata.outputs] == [
        ("scores", "FP32", [-1, 1]),
        ("items", "INT64", [-1]),
        ("item_scores", "FP32", [-1]),
        ("user_embedding", "FP32", [4]),
    ]
    assert metadata.parameters.reuse == "append"
    assert metadata.parameters.max_history_events == 10
    assert (metadata.parameters.page_size, metadata.parameters.chunk_size) == (8, 32)
    assert metadata.parameters.token_bytes == 512
    assert metadata.parameters.sample_items == [3, 1]
