"""Bodies of /v1/rank and /v1/retrieve, as tables."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from engine.entrypoints.native_api import NativeCall, decode_call, encode_response
from engine.entrypoints.protocol import ErrorBody, error_body, to_json
from engine.errors import InvalidRequest, Overloaded, RequestError, TooLarge
from engine.types import Request, Response, Task, Usage


def decode(content: Any, task: Task = Task.RANK, max_requests: int = 3) -> NativeCall:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return decode_call(body, task, request_id="r", arrival_s=1.0, max_requests=max_requests)


def only(call: NativeCall) -> Request:
    (request,) = call.requests
    assert isinstance(request, Request)
    return request


def test_one_request_is_decoded() -> None:
    call = decode(
        {
            "user_id": 12,
            "history": {"item": [1, 2], "action": [5], "mood": [[0.5, 1], [2, 3]]},
            "candidates": [4],
            "context": [6],
            "deadline_ms": 100,
            "return_user_embedding": True,
        }
    )
    assert not call.is_batch
    request = only(call)
    assert (request.user_id, request.request_id) == ("12", "r")
    assert request.history is not None
    assert request.history["item"].tolist() == [1, 2]
    assert request.history["action"].tolist() == [5]
    assert request.history["mood"].tolist() == [[0.5, 1.0], [2.0, 3.0]]
    assert request.candidates is not None
    assert request.candidates["item"].tolist() == [4]
    assert request.context is not None
    assert request.context.tolist() == [6]
    assert request.deadline_s == 1.1
    assert request.return_user_embedding


def test_delta_request_is_decoded() -> None:
    base = {"base_length": 32, "base_fingerprint": "0f" * 16}
    request = only(decode({"user_id": "u", "history": [7], "candidates": [4], **base}))
    assert (request.base_length, request.base_fingerprint) == (32, "0f" * 16)
    with pytest.raises(InvalidRequest, match="base_fingerprint ''"):
        decode({"user_id": "u", "history": [7], "candidates": [4], "base_length": 32})


def test_null_members_count_as_absent() -> None:
    request = only(
        decode({"user_id": "u", "history": [], "context": None, "topk": None}, Task.RETRIEVE)
    )
    assert request.context is None
    assert request.top_k == 10


def test_a_batch_keeps_its_order_and_each_its_own_error() -> None:
    call = decode(
        {
            "requests": [
                {"user_id": "a", "history": [1], "candidates": [2]},
                {"user_id": "b", "history": [True], "candidates": [2]},
                {"user_id": "c", "history": [], "candidates": [2], "request_id": "mine"},
            ]
        }
    )
    assert call.is_batch
    first, second, third = call.requests
    assert isinstance(first, Request)
    assert first.request_id == "r.0"
    assert isinstance(second, RequestError)
    assert "bool" in second.message
    assert isinstance(third, Request)
    assert third.request_id == "mine"


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"nope", "JSON"),
        ([], "body"),
        ({}, "user_id"),
        ({"user_id": "u", "candidates": [1]}, "history"),
        ({"user_id": "u", "history": [1]}, "candidates"),
        ({"user_id": True, "history": [1], "candidates": [1]}, "user_id"),
        ({"user_id": "", "history": [1], "candidates": [1]}, "user_id"),
        ({"user_id": "u", "history": 5, "candidates": [1]}, "history"),
        ({"user_id": "u", "history": {"action": [1]}, "candidates": [1]}, "`item`"),
        ({"user_id": "u", "history": [1.5], "candidates": [1]}, r"history\.item"),
        ({"user_id": "u", "history": [[1]], "candidates": [1]}, r"history\.item"),
        ({"user_id": "u", "history": [1], "candidates": [1], "typo": 1}, "typo"),
        ({"user_id": "u", "history": [1], "candidates": [1], "topk": 0}, "topk"),
        (
            {"user_id": "u", "history": [1], "candidates": [1], "context": {"a": 1}},
            "in the model's",
        ),
        ({"requests": []}, "requests"),
        ({"requests": [], "topk": 1}, "topk"),
        ({"requests": 1}, "requests"),
    ],
)
def test_what_is_wrong_is_named(content: Any, names: str) -> None:
    with pytest.raises(InvalidRequest, match=names):
        decode(content)


def test_too_many_requests_in_one_body_are_refused() -> None:
    with pytest.raises(TooLarge, match="max_requests_per_call=3") as refused:
        decode({"requests": [{}] * 4})
    assert (refused.value.limit, refused.value.value) == (3, 4)


def test_an_answer_leaves_out_what_is_not_there() -> None:
    response = Response(
        request_id="r", usage=Usage(computed_tokens=1, history_length=1),
        scores=np.array([[0.5], [1.5]], np.float32),
    )  # fmt: skip
    answer = json.loads(to_json(encode_response(response)))
    assert set(answer) == {"request_id", "usage", "scores"}
    assert answer["scores"] == [[0.5], [1.5]]
    assert answer["usage"]["computed_tokens"] == 1


def test_an_error_body_repeats_the_numbers() -> None:
    error = Overloaded("full", limit=200, value=200.5, retry_after_s=2)
    assert json.loads(to_json(error_body(error, "r", status=429))) == {
        "error": "full", "code": "overloaded", "limit": 200, "value": 200.5,
        "request_id": "r", "status": 429,
    }  # fmt: skip
    assert json.loads(to_json(ErrorBody(error="e", code="c"))) == {"error": "e", "code": "c"}
