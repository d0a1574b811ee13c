"""Time buckets of the research bias by integer edges."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention_backends.base import LayerBias
from engine.attention_backends.bias import bias_values, bucket_edges, time_buckets


def _exact_bucket(seconds: int) -> int:
    """The formula with 40 digits."""
    getcontext().prec = 40
    return min(128, math.floor(Decimal(max(1, seconds)).ln() / Decimal("0.301")))


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0, 0), (1, 0), (2, 2), (3, 3), (4, 4), (60, 13), (86400, 37)]
)
def test_known_differences_fall_into_their_bucket(seconds, bucket):
    found = time_buckets(torch.tensor([1000]), torch.tensor([1000 - seconds]))
    assert found.tolist() == [bucket]


@given(st.integers(0, 1 << 40))
def test_bucket_equals_the_formula_either_way_in_time(seconds):
    forward = time_buckets(torch.tensor(0), torch.tensor(seconds))
    backward = time_buckets(torch.tensor(seconds), torch.tensor(0))
    assert forward.item() == backward.item() == _exact_bucket(seconds)


def test_every_edge_begins_its_bucket():
    for bucket, edge in enumerate(bucket_edges(), 1):
        if edge > 1 << 45:
            break  # beyond any time difference, where float64 cannot tell neighbours apart
        assert _exact_bucket(edge) >= bucket > _exact_bucket(edge - 1)


def test_edges_never_fall_and_last_bucket_is_open():
    edges = bucket_edges()
    assert list(edges) == sorted(edges)
    assert time_buckets(torch.tensor(1 << 61), torch.tensor(0)).item() == 128


def test_bias_adds_the_weights_of_distance_and_bucket():
    tables = LayerBias(torch.arange(7.0), 100 * torch.arange(129.0))
    buckets = torch.tensor([[0, 2, 5]], dtype=torch.int32)
    values = bias_values(tables, torch.tensor([[2]]), torch.tensor([[0, 1, 2]]), buckets)
    assert values.tolist() == [[1.0, 202.0, 503.0]]
