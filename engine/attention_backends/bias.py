"""The `research` bias: a weight by distance and a weight by time bucket, added to q.k.

bias[row, key] = position[(n - 1) + (key_position - row_position)] + time[bucket(dt)], where
dt = |next_time[row] - time[key]| and bucket(dt) = min(128, floor(ln(max(1, dt)) / 0.301))
(Meta's generative-recommenders, relative bucketed time and position bias). A vectorised logarithm
may put a border on either side, so buckets are found by integer edges, taken once in float64.
"""

from __future__ import annotations

import functools
import math

import torch

from engine.attention_backends.base import LayerBias

MAX_BUCKET = 128
_SECONDS_END = 1 << 62
_FARTHEST = (1 << 63) - 1


def bucket_of(seconds: int) -> int:
    """The bucket of one time difference, by its formula in float64."""
    return min(MAX_BUCKET, math.floor(math.log(max(1, seconds)) / 0.301))


@functools.cache
def bucket_edges() -> tuple[int, ...]:
    """edges[b - 1] is the smallest time difference whose bucket is b or more, b = 1..128."""
    edges = []
    for bucket in range(1, MAX_BUCKET + 1):
        below, reached = 0, _SECONDS_END
        while reached - below > 1:
            middle = (below + reached) // 2
            if bucket_of(middle) >= bucket:
                reached = middle
            else:
                below = middle
        edges.append(reached)
    return tuple(edges)


@functools.cache
def _edges_tensor() -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(bucket_edges(), dtype=torch.int64)


def time_buckets(next_time: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """Bucket of |next_time - time|, int64 seconds that broadcast -> int32.

    Times that are farther apart than an int64 can say are as far apart as it can.
    """
    apart = torch.maximum(next_time, time) - torch.minimum(next_time, time)
    apart.masked_fill_(apart < 0, _FARTHEST)
    return torch.searchsorted(_edges_tensor(), apart, right=True, out_int32=True)


def bias_values(
    tables: LayerBias,
    row_position: torch.Tensor,
    key_position: torch.Tensor,
    buckets: torch.Tensor,
) -> torch.Tensor:
    """float32 bias; the positions broadcast to the shape of `buckets` (int32).

    A distance outside the table takes its nearest end: only hidden keys have one.
    """
    last = len(tables.position) - 1
    distance = (key_position - row_position + last // 2).clamp_(0, last)
    by_position = tables.position.index_select(0, distance.reshape(-1))
    by_time = tables.time.index_select(0, buckets.reshape(-1))
    return (by_position + by_time).view(buckets.shape)
