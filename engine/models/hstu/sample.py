"""A made-up request of a model: valid, of any size, with values that mean nothing. numpy only.

And some ids of its catalogue, for those who make up their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.models.config import Feature, ModelConfig
from engine.types import Int64Array, Request, Task

_NUM_SAMPLE_ITEMS = 64
_FIRST_TIME = 1_600_000_000
_SECONDS_AN_EVENT = 60
_TOP_K = 10


def sample_request(
    config: ModelConfig, item_ids: Int64Array, task: Task, num_events: int, num_candidates: int
) -> Request:
    """See `Model.sample_request`. item_ids: int64 [num_items], the catalogue."""
    inputs = config.inputs
    num_events = min(num_events, inputs.max_history_events)
    history = _events(inputs.features, item_ids, num_events, "history")
    query_time = None
    if config.layers.relative_bias or inputs.num_time_buckets:
        history["time"] = _FIRST_TIME + _SECONDS_AN_EVENT * np.arange(num_events, dtype=np.int64)
        query_time = _FIRST_TIME + _SECONDS_AN_EVENT * num_events
    candidates = None
    if task is Task.RANK:
        candidates = _events(inputs.features, item_ids, num_candidates, "candidates")
    return Request(
        request_id="sample",
        user_id="sample",
        task=task,
        history=history,
        candidates=candidates,
        context=np.zeros(len(inputs.context), np.int64) if inputs.context else None,
        query_time=query_time,
        top_k=_TOP_K if task is Task.RETRIEVE else None,
    )


def _events(
    features: tuple[Feature, ...], item_ids: Int64Array, count: int, where: str
) -> dict[str, np.ndarray[Any, Any]]:
    """`count` events or candidates that go through the rows of every table."""
    numbers = np.arange(count, dtype=np.int64)
    arrays: dict[str, np.ndarray[Any, Any]] = {"item": item_ids[numbers % len(item_ids)]}
    for feature in features[1:]:
        if feature.on not in ("both", where):
            continue
        if feature.num_rows:
            arrays[feature.name] = numbers % feature.num_rows
        else:
            arrays[feature.name] = np.zeros((count, feature.dim), np.float32)
    return arrays


def sample_items(item_ids: Int64Array) -> tuple[int, ...]:
    """At most `_NUM_SAMPLE_ITEMS` ids, evenly spread over the catalogue int64 [num_items]."""
    count = min(len(item_ids), _NUM_SAMPLE_ITEMS)
    return tuple(item_ids[np.arange(count) * len(item_ids) // count].tolist())
