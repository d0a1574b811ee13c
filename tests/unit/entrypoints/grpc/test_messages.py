"""Protobuf requests and answers, as tables."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from wire_model import INFO

from engine.entrypoints.grpc.inference_pb2 import ModelInferRequest, ModelInferResponse
from engine.entrypoints.grpc.messages import (
    decode_request,
    encode_response,
    metadata_message,
    parse_request,
)
from engine.errors import InvalidRequest
from engine.types import CacheMode, Response, Reuse, Task, Usage

USER = ("user_id", "BYTES", [1], b"\x02\x00\x00\x00u1")
HISTORY = ("history", "INT64", [3], struct.pack("<3q", 3, -1, 2))
CANDIDATES = ("candidates", "INT64", [2], struct.pack("<2q", 7, 8))


def raw(*tensors: tuple[str, str, list[int], bytes]) -> ModelInferRequest:
    message = ModelInferRequest(model_name="m")
    for name, datatype, shape, content in tensors:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(content)
    return message


def typed(name: str, datatype: str, shape: list[int], **contents: list[Any]) -> ModelInferRequest:
    """A user, and one more input."""
    message = ModelInferRequest(model_name="m")
    user = message.inputs.add(name="user_id", datatype="BYTES", shape=[1])
    user.contents.bytes_contents.append(b"u1")
    tensor = message.inputs.add(name=name, datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(tensor.contents, field).extend(values)
    return message


def decode(message: ModelInferRequest, timeout_ms: float | None = None) -> Any:
    return decode_request(
        parse_request(message.SerializeToString()),
        INFO,
        request_id="made",
        arrival_s=100.0,
        timeout_ms=timeout_ms,
    )


def test_raw_contents_are_decoded() -> None:
    mood = ("history_mood", "FP32", [3, 2], struct.pack("<6f", 0.5, 1, 2, 3, 4, 5))
    message = raw(USER, HISTORY, CANDIDATES, mood)
    message.id = "abc"
    message.model_version = "8"
    for name, value in (("query_time", 12), ("topk", 1), ("priority", 3)):
        message.parameters[name].int64_param = value
    message.parameters["cache"].string_param = "bypass"
    message.parameters["ignore_extra"].bool_param = True
    message.parameters["deadline_ms"].double_param = 12.5
    message.parameters["timeout"].uint64_param = 250_000
    message.outputs.add(name="scores")
    message.outputs.add(name="user_embedding")
    call = decode(message)
    request = call.request
    assert call.outputs == (("scores", True), ("user_embedding", True))
    assert (call.id, request.request_id, request.task) == ("abc", "abc", Task.RANK)
    assert request.weights_version == "8"
    assert request.user_id == "u1"
    assert request.history["item"].tolist() == [3, -1, 2]
    assert request.history["mood"].tolist() == [[0.5, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert request.candidates["item"].tolist() == [7, 8]
    assert (request.query_time, request.top_k, request.priority) == (12, 1, 3)
    assert (request.cache, request.ignore_extra) == (CacheMode.BYPASS, True)
    assert request.deadline_s == 100.0125


@pytest.mark.parametrize(("timeout_ms", "deadline_s"), [(5.0, 100.005), (5000.0, 100.25)])
def test_the_earliest_deadline_counts(timeout_ms: float, deadline_s: float) -> None:
    message = raw(USER, HISTORY)
    message.parameters["timeout"].int64_param = 250_000
    assert decode(message, timeout_ms).request.deadline_s == deadline_s


def test_typed_contents_are_decoded() -> None:
    call = decode(typed("history", "INT64", [2], int64_contents=[5, -(2**63)]))
    assert call.request.history["item"].tolist() == [5, -(2**63)]
    assert call.outputs == (("items", False), ("item_scores", False))
    assert call.request.request_id == "made"
    assert call.id is None


def test_an_empty_history_needs_no_contents() -> None:
    assert decode(typed("history", "INT64", [0])).request.history["item"].shape == (0,)
    assert decode(raw(USER, ("history", "INT64", [0], b""))).request.history["item"].size == 0


def with_parameter(target: str) -> ModelInferRequest:
    message = raw(USER, HISTORY)
    message.outputs.add(name="items")
    owner = {"request": message, "input": message.inputs[1], "output": message.outputs[0]}
    owner[target].parameters["odd"].bool_param = True
    return message


def with_contents_beside_raw() -> ModelInferRequest:
    message = raw(USER, HISTORY)
    message.inputs[1].contents.int64_contents.extend([3, -1, 2])
    return message


def without_a_value() -> ModelInferRequest:
    message = raw(USER, HISTORY)
    message.parameters["topk"].SetInParent()
    return message


def without_one_raw() -> ModelInferRequest:
    message = raw(USER, HISTORY)
    del message.raw_input_contents[1]
    return message


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (raw(HISTORY), "user_id is missing"),
        (raw(USER), "history is missing"),
        (raw(USER, HISTORY, HISTORY), "'history' is there twice"),
        (raw(USER, ("history", "INT64", [3], b"\0" * 23)), "'history' has 23 bytes.*takes 24"),
        (raw(USER, ("history", "INT64", [-3], b"\0" * 24)), "'history'.*-3"),
        (raw(USER, ("history", "INT64", [2**62], b"\0" * 24)), "'history'.*too large"),
        (raw(USER, ("history", "INT32", [6], b"\0" * 24)), "'history'.*INT32"),
        (raw(USER, ("history_typo", "INT64", [3], b"\0" * 24), HISTORY), "'history_typo'"),
        (without_one_raw(), "1 entries for 2 inputs"),
        (with_contents_beside_raw(), "'history' has contents beside"),
        (with_parameter("request"), "odd"),
        (with_parameter("input"), "'history' has the parameter 'odd'"),
        (with_parameter("output"), "'items' has the parameter 'odd'"),
        (without_a_value(), "'topk' has no value"),
        (typed("history", "INT64", [1], int64_contents=[1, 2]), "'history'.*2 values"),
        (typed("history", "INT64", [2]), "'history' has 0 bytes"),
        (typed("history", "INT64", [1], int_contents=[1]), "'history' has int_contents"),
        (typed("history", "INT64", [1], fp32_contents=[1]), "'history'.*int64_contents"),
        (typed("history", "INT64", [1], bytes_contents=[b"1"]), "'history'.*int64_contents"),
        (
            typed("history", "INT64", [1], int64_contents=[1], fp32_contents=[1]),
            "'history' has contents of 2 types",
        ),
        (typed("history_mood", "FP32", [1], int64_contents=[1]), "'history_mood'.*fp32_contents"),
    ],
)
def test_what_is_wrong_is_named(message: ModelInferRequest, names: str) -> None:
    with pytest.raises(InvalidRequest, match=names):
        decode(message)


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="ModelInferRequest"):
        parse_request(b"\xff\xff")


RESPONSE = Response(
    request_id="abc",
    usage=Usage(
        device_tokens=2, host_tokens=3, computed_tokens=4, history_length=9, base_length=8,
        fingerprint="ab", weights_version="7", reuse=Reuse.EXACT, queue_us=1, onload_wait_us=2,
        run_us=3,
    ),
    items=np.array([7, 9]),
    item_scores=np.array([0.5, 0.25], np.float32),
)  # fmt: skip


def reparsed(message: ModelInferResponse) -> ModelInferResponse:
    return ModelInferResponse.FromString(message.SerializeToString())


def test_an_answer_to_raw_contents_is_raw() -> None:
    answer = reparsed(encode_response(decode(raw(USER, HISTORY)), RESPONSE, "m"))
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "7", "")
    assert [(one.name, one.datatype, list(one.shape)) for one in answer.outputs] == [
        ("items", "INT64", [2]),
        ("item_scores", "FP32", [2]),
    ]
    assert list(answer.raw_output_contents) == [
        struct.pack("<2q", 7, 9),
        struct.pack("<2f", 0.5, 0.25),
    ]
    numbers = {
        name: parameter.int64_param
        for name, parameter in answer.parameters.items()
        if parameter.WhichOneof("parameter_choice") == "int64_param"
    }
    assert numbers == {
        "device_tokens": 2, "host_tokens": 3, "computed_tokens": 4, "history_length": 9,
        "base_length": 8, "queue_us": 1, "onload_wait_us": 2, "run_us": 3,
    }  # fmt: skip
    texts = {name: answer.parameters[name].string_param for name in set(answer.parameters)}
    assert texts | dict.fromkeys(numbers, "") == {
        **dict.fromkeys(numbers, ""), "fingerprint": "ab", "weights_version": "7", "reuse": "exact",
    }  # fmt: skip


def test_an_answer_to_typed_contents_is_typed() -> None:
    message = typed("history", "INT64", [1], int64_contents=[5])
    message.id = "abc"
    answer = reparsed(encode_response(decode(message), RESPONSE, "m"))
    assert answer.id == "abc"
    assert not answer.raw_output_contents
    assert list(answer.outputs[0].contents.int64_contents) == [7, 9]
    assert list(answer.outputs[1].contents.fp32_contents) == [0.5, 0.25]


def test_metadata_lists_what_the_model_declares() -> None:
    metadata = metadata_message(INFO, ["7", "8"])
    assert (metadata.name, list(metadata.versions)) == ("m", ["7", "8"])
    assert ("history_mood", "FP32", [-1, 2]) in [
        (one.name, one.datatype, list(one.shape)) for one in metadata.inputs
    ]
    assert [one.name for one in metadata.outputs] == [
        "scores", "items", "item_scores", "user_embedding",
    ]  # fmt: skip
