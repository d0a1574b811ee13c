"""Infer bodies with binary tensors, and answers with them, byte by byte."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from wire_model import INFO

from engine.entrypoints.oip_http import decode_infer, encode_infer
from engine.errors import InvalidRequest
from engine.types import Response, Usage


def binary(name: str, datatype: str, shape: list[int], size: int) -> dict[str, Any]:
    parameters = {"binary_data_size": size}
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": parameters}


def body(inputs: list[dict[str, Any]], *tails: bytes, **members: Any) -> tuple[bytes, str]:
    """The body, and the header that tells where its JSON ends."""
    content = json.dumps({"inputs": inputs, **members}).encode()
    return b"".join((content, *tails)), str(len(content))


def decode(content: bytes, header_length: str | None) -> Any:
    return decode_infer(
        content, INFO, request_id="made", arrival_s=1.0, header_length=header_length
    )


USER = binary("user_id", "BYTES", [1], 6)
USER_BYTES = b"\x02\x00\x00\x00u1"
HISTORY = binary("history", "INT64", [3], 24)
HISTORY_BYTES = b"\x03" + b"\x00" * 7 + b"\xff" * 8 + b"\x00" * 7 + b"\x80"


def test_tensors_follow_the_json_in_the_order_of_the_inputs() -> None:
    content, header_length = body(
        [
            USER,
            HISTORY,
            {"name": "candidates", "datatype": "INT64", "shape": [2], "data": [7, 8]},
            binary("candidate_mood", "FP32", [2, 2], 16),
            {"name": "context", "datatype": "INT64", "shape": [2], "data": [1, 2]},
            binary("history_action", "INT64", [2], 16),
        ],
        USER_BYTES,
        HISTORY_BYTES,
        struct.pack("<4f", 0.5, 1, -2, 3),
        struct.pack("<2q", 4, -5),
    )
    request = decode(content, header_length).request
    assert request.user_id == "u1"
    assert request.history["item"].tolist() == [3, -1, -(2**63)]
    assert request.history["action"].tolist() == [4, -5]
    assert request.candidates["item"].tolist() == [7, 8]
    assert request.candidates["mood"].tolist() == [[0.5, 1.0], [-2.0, 3.0]]
    assert request.candidates["mood"].dtype == np.float32
    assert request.context.tolist() == [1, 2]


@pytest.mark.parametrize("padding", range(8))
def test_arrays_are_views_at_any_alignment(padding: int) -> None:
    values = np.arange(1000, dtype="<i8") * 123_456_789
    inputs = [USER, binary("history", "INT64", [1000], 8000)]
    content, header_length = body(inputs, USER_BYTES, values.tobytes(), id="x" * (padding + 1))
    item = decode(content, header_length).request.history["item"]
    assert np.shares_memory(item, np.frombuffer(content, np.uint8))
    assert not item.flags.writeable
    assert item.dtype == np.int64
    assert (item == values).all()


@pytest.mark.parametrize(
    ("user", "user_bytes", "text"),
    [
        (binary("user_id", "INT64", [1], 8), struct.pack("<q", -123), "-123"),
        (binary("user_id", "BYTES", [1], 7), b"\x03\x00\x00\x00123", "123"),
        (binary("user_id", "BYTES", [1], 6), b"\x02\x00\x00\x00\xc3\xa9", "\u00e9"),
    ],
)
def test_user_ids_are_text(user: dict[str, Any], user_bytes: bytes, text: str) -> None:
    content, header_length = body([user, HISTORY], user_bytes, HISTORY_BYTES)
    assert decode(content, header_length).request.user_id == text


def test_an_empty_history_takes_no_bytes() -> None:
    content, header_length = body([USER, binary("history", "INT64", [0], 0)], USER_BYTES)
    assert decode(content, header_length).request.history["item"].shape == (0,)


def test_a_header_is_legal_over_json_alone() -> None:
    user = {"name": "user_id", "datatype": "BYTES", "shape": [1], "data": ["u1"]}
    history = {"name": "history", "datatype": "INT64", "shape": [1], "data": [5]}
    content, header_length = body([user, history])
    assert decode(content, header_length).request.history["item"].tolist() == [5]


def two(
    history: dict[str, Any], history_bytes: bytes = HISTORY_BYTES, **members: Any
) -> tuple[bytes, str]:
    return body([USER, history], USER_BYTES, history_bytes, **members)


def as_user(user: dict[str, Any], user_bytes: bytes) -> tuple[bytes, str]:
    return body([user, HISTORY], user_bytes, HISTORY_BYTES)


@pytest.mark.parametrize(
    ("sent", "names"),
    [
        ((two(HISTORY)[0], None), "trailing|malformed"),
        ((body([USER, HISTORY])[0], None), "'user_id'.*no header"),
        ((two(HISTORY)[0], "9999"), "9999, but the body has"),
        ((two(HISTORY)[0], "9" * 5000), "9999.*but the body has"),
        ((two(HISTORY)[0], "-1"), "'-1'"),
        ((two(HISTORY)[0], "1e3"), "'1e3'"),
        ((two(HISTORY)[0], ""), "''"),
        ((two(HISTORY)[0], "0"), "JSON"),
        ((two(HISTORY)[0], "10"), "JSON"),
        (two(HISTORY, HISTORY_BYTES[:-1]), "'history'.* 24, but 23 bytes are left"),
        (two(HISTORY, HISTORY_BYTES + b"\0"), "31 bytes follow.*add up to 30"),
        (two(binary("history", "INT64", [3], 23), b"\0" * 23), "'history' has 23 bytes.*takes 24"),
        (two(binary("history", "INT64", [2], 24)), r"'history' has 24 bytes.*\[2\] takes 16"),
        (two(binary("history", "INT64", [3], -24)), "'history'.*-24"),
        (two(binary("history", "INT64", [3], 2**80)), "'history'"),
        (two(binary("history", "INT64", [-3], 24)), "'history'.*-3"),
        (two(binary("history", "INT64", [2**61], 24)), "'history'.*too large"),
        (two(binary("history", "INT64", [2**64 + 3], 24)), "'history'.*too large"),
        (two(binary("history", "INT64", [3, 1], 24)), r"'history'.*\[3, 1\]"),
        (two(binary("history", "INT64", [], 24)), "'history'"),
        (two(binary("history", "INT32", [6], 24)), "'history'.*INT32.*INT64"),
        (two(binary("history", "FP64", [3], 24)), "'history'.*FP64"),
        (two({**HISTORY, "data": [1, 2, 3]}), "'history' has both"),
        (two(binary("history_mood", "BYTES", [3], 24)), "'history_mood'.*BYTES"),
        (two(binary("history_mood", "FP32", [2**40, 2**40], 24)), "'history_mood'.*too large"),
        (two(binary("history_mood", "FP32", [1] * 70_000, 24)), "'history_mood' has 70000 dim"),
        (as_user(binary("user_id", "BYTES", [1], 3), b"\0\0\0"), "'user_id' has 3 bytes"),
        (as_user(USER, b"\x03\0\0\0u1"), "'user_id' announces.*3 bytes and has 2"),
        (as_user(USER, b"\xff\xff\xff\xffu1"), "'user_id' announces.*4294967295"),
        (as_user(USER, b"\x02\0\0\0\xff\xff"), "'user_id' is no UTF-8"),
        (as_user(binary("user_id", "BYTES", [1], 4), b"\0\0\0\0"), "user_id is ''"),
        (as_user(binary("user_id", "INT64", [1], 4), b"\0\0\0\0"), "'user_id' has 4 bytes"),
        (as_user(binary("user_id", "BYTES", [2], 6), USER_BYTES), r"'user_id'.*\[2\]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(sent: tuple[bytes, str | None], names: str) -> None:
    with pytest.raises(InvalidRequest, match=names):
        decode(*sent)


def test_an_error_carries_its_numbers() -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(*two(binary("history", "INT64", [2], 24)))
    assert (raised.value.limit, raised.value.value) == (16, 24)


def test_nan_is_refused_in_binary_features() -> None:
    mood = binary("history_mood", "FP32", [3, 2], 24)
    content, header_length = body(
        [USER, HISTORY, mood], USER_BYTES, HISTORY_BYTES, struct.pack("<6f", *[float("nan")] * 6)
    )
    with pytest.raises(InvalidRequest, match=r"history\.mood has NaN"):
        decode(content, header_length)


RESPONSE = Response(
    request_id="r",
    usage=Usage(weights_version="7"),
    scores=np.array([[0.5, 1.0], [0.25, 2.0]], np.float32),
    items=np.array([7]),
    item_scores=np.array([0.5], np.float32),
    user_embedding=np.array([1, 2, 3, 4], np.float32),
)
RANK = [
    USER,
    HISTORY,
    {"name": "candidates", "datatype": "INT64", "shape": [2], "data": [7, 8]},
]


def answer_to(**members: Any) -> tuple[dict[str, Any], bytes, int | None]:
    """JSON of the answer, the bytes after it, and the length that the header will tell."""
    content, header_length = body(RANK, USER_BYTES, HISTORY_BYTES, **members)
    reply = encode_infer(decode(content, header_length), RESPONSE, "m")
    json_bytes = len(reply.body) if reply.json_bytes is None else reply.json_bytes
    return json.loads(reply.body[:json_bytes]), reply.body[json_bytes:], reply.json_bytes


def test_outputs_are_json_unless_bytes_are_asked_for() -> None:
    answer, tail, json_bytes = answer_to()
    assert answer["outputs"][0]["data"] == [0.5, 1.0, 0.25, 2.0]
    assert (tail, json_bytes) == (b"", None)


def test_all_outputs_are_bytes_by_one_parameter() -> None:
    parameters = {"topk": 1, "binary_data_output": True}
    answer, tail, json_bytes = answer_to(parameters=parameters)
    assert json_bytes is not None
    assert answer["outputs"] == [
        {"name": "scores", "datatype": "FP32", "shape": [2, 2],
         "parameters": {"binary_data_size": 16}},
        {"name": "items", "datatype": "INT64", "shape": [1],
         "parameters": {"binary_data_size": 8}},
        {"name": "item_scores", "datatype": "FP32", "shape": [1],
         "parameters": {"binary_data_size": 4}},
    ]  # fmt: skip
    assert tail == struct.pack("<4fqf", 0.5, 1.0, 0.25, 2.0, 7, 0.5)


def test_an_output_overrides_the_default_for_all() -> None:
    outputs = [
        {"name": "user_embedding"},
        {"name": "scores", "parameters": {"binary_data": False}},
        {"name": "items", "parameters": {"binary_data": True}},
    ]
    answer, tail, _ = answer_to(parameters={"topk": 1, "binary_data_output": True}, outputs=outputs)
    assert [("data" in output) for output in answer["outputs"]] == [False, True, False]
    assert tail == struct.pack("<4fq", 1, 2, 3, 4, 7)
    answer, tail, _ = answer_to(parameters={"topk": 1}, outputs=outputs)
    assert [("data" in output) for output in answer["outputs"]] == [True, True, False]
    assert tail == struct.pack("<q", 7)
