"""Bodies of /v1/users:prefetch."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.entrypoints.prefetch_api import PrefetchCall, decode_prefetch
from engine.errors import InvalidRequest, TooLarge
from engine.types import Request, Task


def decode(content: Any, routed: str | None = None) -> PrefetchCall:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return decode_prefetch(body, request_id="r", arrival_s=1.0, max_requests=3, routed_user=routed)


def test_users_become_prefetches_without_a_history() -> None:
    call = decode({"users": ["a", 7], "namespace": "n"})
    assert call.user_ids == ["a", "7"]
    for index, request in enumerate(call.requests):
        assert isinstance(request, Request)
        assert (request.task, request.history, request.namespace) == (Task.PREFETCH, None, "n")
        assert request.request_id == f"r.{index}"


def test_histories_become_prefetches_that_compute() -> None:
    call = decode(
        {
            "requests": [
                {"user_id": "a", "history": {"item": [1, 2]}, "context": [3], "query_time": 9,
                 "deadline_ms": 50, "priority": 2, "history_start": 4},
                {"user_id": "b"},
                {"user_id": "c", "history": None},
            ]
        }
    )  # fmt: skip
    assert call.user_ids == ["a", "", ""]
    first, second, third = call.requests
    assert isinstance(first, Request)
    assert first.task is Task.PREFETCH
    assert first.history is not None
    assert first.history["item"].tolist() == [1, 2]
    assert first.context is not None
    assert first.context.tolist() == [3]
    assert (first.query_time, first.deadline_s, first.priority, first.history_start) == (
        9, 1.05, 2, 4,
    )  # fmt: skip
    assert isinstance(second, InvalidRequest)
    assert "history" in second.message
    assert isinstance(third, InvalidRequest)
    assert "`users`" in third.message


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"nope", "JSON"),
        ({}, "users"),
        ({"users": []}, "users is empty"),
        ({"users": ["a", ""]}, "user_id"),
        ({"users": ["a", None]}, r"users"),
        ({"users": "a"}, "users"),
        ({"users": ["a"], "typo": 1}, "typo"),
        ({"users": ["a"], "requests": []}, "beside `requests`"),
        ({"requests": []}, "requests is empty"),
        ({"users": ["a"], "namespace": 3}, "namespace"),
    ],
)
def test_what_is_wrong_is_named(content: Any, names: str) -> None:
    with pytest.raises(InvalidRequest, match=names):
        decode(content)


@pytest.mark.parametrize("content", [{"users": ["a"] * 4}, {"requests": [{}] * 4}])
def test_too_many_are_refused(content: Any) -> None:
    with pytest.raises(TooLarge, match="max_requests_per_call=3") as refused:
        decode(content)
    assert (refused.value.limit, refused.value.value) == (3, 4)


def test_the_routing_header_must_agree_with_every_user() -> None:
    assert decode({"users": ["a", "a"]}, "a").user_ids == ["a", "a"]
    with pytest.raises(InvalidRequest, match="routing header"):
        decode({"users": ["a", "b"]}, "a")
    assert decode({"requests": [{"history": []}]}, "a").user_ids == ["a"]
