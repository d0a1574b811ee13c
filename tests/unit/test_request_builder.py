"""Keyword arguments become requests, or errors that name the field."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.request_builder import build_request
from engine.types import CacheMode, Request, Task


def rank(**changed: Any) -> Request:
    arguments: dict[str, Any] = {"user_id": "u", "history": [1, 2], "candidates": [3]}
    return build_request(task=Task.RANK, **{**arguments, **changed})


@pytest.mark.parametrize(
    "history",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        np.array([1, 2]),
        np.array([1, 2], np.int32),
        np.array([1, 2], np.uint64),
        np.array([9, 1, 9, 2])[1::2],
        {"item": [1, 2]},
        {"item": [np.int64(1), 2]},
    ],
)
def test_histories_of_every_form_become_int64(history: Any) -> None:
    built = rank(history=history).history
    assert built is not None
    assert built["item"].dtype == np.int64
    assert built["item"].flags.c_contiguous
    assert built["item"].tolist() == [1, 2]


def test_an_int64_array_is_not_copied() -> None:
    items = np.array([1, 2])
    built = rank(history=items).history
    assert built is not None
    assert built["item"] is items


def test_features_keep_their_kind() -> None:
    built = rank(
        history={"item": [1, 2], "action": [5], "mood": [[0.5, 1], [2, 3]], "age": [1, 2]}
    ).history
    assert built is not None
    assert built["action"].tolist() == [5]
    assert built["mood"].dtype == np.float32
    assert built["mood"].tolist() == [[0.5, 1.0], [2.0, 3.0]]
    assert built["age"].dtype == np.int64


def test_defaults_and_ids() -> None:
    before_s = time.monotonic()
    first, second = rank(user_id=12), rank(user_id=np.int64(-3), deadline_ms=100)
    assert (first.user_id, second.user_id) == ("12", "-3")
    assert first.request_id != second.request_id
    assert first.deadline_s is None
    assert second.deadline_s == second.arrival_s + 0.1
    assert before_s <= first.arrival_s <= time.monotonic()
    assert build_request(task=Task.RETRIEVE, user_id="u", history=[]).top_k == 10
    assert build_request(task=Task.PREFETCH, user_id="u").history is None
    assert rank(cache="refresh").cache is CacheMode.REFRESH


def test_delta_request_names_its_base() -> None:
    delta = rank(base_length=np.int64(12), base_fingerprint="0f" * 16)
    assert delta.is_delta
    assert (delta.base_length, delta.base_fingerprint) == (12, "0f" * 16)
    assert not rank().is_delta


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"user_id": ""}, "user_id"),
        ({"user_id": True}, "user_id"),
        ({"user_id": 1.5}, "user_id"),
        ({"user_id": None}, "user_id"),
        ({"user_id": "x" * 1025}, "1024"),
        ({"user_id": 1 << 128}, "an integer of 129 bits, the limit is 128"),
        ({"user_id": -(10**5000)}, "user_id is an integer of 16610 bits"),
        ({"user_id": "\ud800"}, "user_id"),
        ({"namespace": 3}, "namespace"),
        ({"history": None}, "history"),
        ({"history": "12"}, "history.item"),
        ({"history": 5}, "history.item"),
        ({"history": [1, True]}, "history.item has true"),
        ({"history": [1, "2"]}, "history.item has a str"),
        ({"history": [1, None]}, "history.item"),
        ({"history": [1.0]}, "history.item has float32"),
        ({"history": [2**63]}, "history.item.*64 bits"),
        ({"history": np.array([2**63], np.uint64)}, "history.item.*64 bits"),
        ({"history": np.array([True])}, "history.item has bool"),
        ({"history": np.array([None])}, "history.item has object"),
        ({"history": [[1], [2]]}, "history.item"),
        ({"history": np.zeros((1, 1, 1))}, "history.item"),
        ({"history": {"action": [1]}}, "history has no `item`"),
        ({"history": {"item": [1], "action": []}, "candidates": []}, "candidates"),
        ({"history": {"item": [1, 2, 3], "action": [1]}}, "history.action has 1"),
        ({"history": {"item": [1, 2], "time": [1]}}, "history.time has 1"),
        ({"history": {"item": [1], "mood": [float("nan")]}}, "history.mood has NaN"),
        ({"history": {"item": [1], "mood": [float("inf")]}}, "history.mood has NaN"),
        ({"history": {"item": [1], "mood": [1e300]}}, "history.mood.*float32"),
        ({"history": {"item": [1, 2], "mood": [[1], [2, 3]]}}, "history.mood has rows"),
        ({"history": {1: [1]}}, "feature name 1"),
        ({"candidates": None}, "candidates"),
        ({"candidates": {"item": [1, 2], "action": [1]}}, "candidates.action has 1"),
        ({"context": [1.5]}, "context"),
        ({"query_time": 1.5}, "query_time"),
        ({"query_time": True}, "query_time"),
        ({"top_k": 0}, "top_k is 0: give 1"),
        ({"exclude_history": True}, "exclude_history"),
        ({"return_user_embedding": 1}, "return_user_embedding"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": float("nan")}, "deadline_ms"),
        ({"deadline_ms": True}, "deadline_ms"),
        ({"deadline_ms": 10**400}, "deadline_ms is inf"),
        ({"priority": 2**64}, "priority does not fit in 64 bits"),
        ({"top_k": -(10**5000)}, "top_k does not fit in 64 bits"),
        ({"cache": "maybe"}, "use, bypass or refresh"),
        ({"history_start": -1}, "history_start"),
        ({"history_start": 2**63 - 1}, "history_start is 9223372036854775807.*64 bits"),
        ({"base_length": 2**63 - 1, "base_fingerprint": "0f"}, "base_length 92233720.*64 bits"),
        ({"base_length": 3}, "base_length is 3 and base_fingerprint ''"),
        ({"base_fingerprint": "0f"}, "base_length is 0 and base_fingerprint '0f'"),
        ({"base_length": -1, "base_fingerprint": "0f"}, "base_length is -1"),
        ({"base_length": True}, "base_length is True"),
        ({"base_length": 3, "base_fingerprint": 7}, "base_fingerprint is 7"),
        ({"ignore_extra": "yes"}, "ignore_extra"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(changed: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequest, match=names):
        rank(**changed)


def test_texts_of_other_types_become_plain_texts() -> None:
    class Name(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "another"

    request = rank(user_id=Name("u"), namespace=Name("n"), request_id=Name("r"))
    assert (request.user_id, request.namespace, request.request_id) == ("u", "n", "r")
    assert type(request.user_id) is type(request.namespace) is type(request.request_id) is str


def test_empty_array_of_floats_is_an_empty_history() -> None:
    request = rank(history=np.array([]))
    assert request.history is not None
    assert request.history["item"].dtype == np.int64
    assert len(request.history["item"]) == 0
