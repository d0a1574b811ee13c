"""What the native operators say to arguments that they cannot follow, and to extreme numbers."""

from __future__ import annotations

import pytest
import torch

from engine.attention_backends.bias import MAX_BUCKET, bucket_edges, time_buckets
from engine.native_library import load_library

TILE = 64
REACH = 5


@pytest.fixture(autouse=True, scope="module")
def _library():
    assert load_library() is None


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attend(
    keys: torch.Tensor,
    kv_hi: list[int],
    *,
    values: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    kv_lo: list[int] | None = None,
    chains: torch.Tensor | None = None,
    bias: list[torch.Tensor] | None = None,
    score: str = "silu",
) -> torch.Tensor:
    """Rows of one request whose history is the one page of `keys` [S, K, A]; queries of ones."""
    num_rows, heads = len(kv_hi), keys.shape[1]
    values = keys if values is None else values
    q = torch.ones(num_rows, max(heads, 1), keys.shape[2]) if q is None else q
    out = torch.full((num_rows, q.shape[1], values.shape[2]), torch.nan)
    torch.ops.engine.attention(
        q,
        torch.ones(num_rows, heads, keys.shape[2]),
        torch.ones(num_rows, heads, values.shape[2]),
        keys[None],
        values[None],
        ints([0, num_rows]),
        ints(kv_lo or [0] * num_rows),
        ints(kv_hi),
        ints([[0]]),
        ints([] if chains is None else range(num_rows)),
        ints([[]]) if chains is None else chains,
        *(bias or [None] * 6),
        1.0,
        1.0,
        score == "softmax",
        out,
        None,
    )
    return out


def bias_of(num_rows: int, row_position: int, chain_columns: int) -> list[torch.Tensor]:
    return [
        torch.zeros(2 * (REACH + TILE) + 1),
        torch.zeros(MAX_BUCKET + 1),
        torch.full((num_rows,), row_position),
        torch.zeros(num_rows, TILE, dtype=torch.uint8),
        torch.zeros(num_rows, chain_columns, dtype=torch.uint8),
        torch.zeros(num_rows, chain_columns, dtype=torch.int64),
    ]


def test_pages_without_heads_are_refused():
    with pytest.raises(RuntimeError, match="at least one head"):
        attend(torch.ones(1, 0, 4), [1])


def test_keys_past_what_positions_can_say_are_refused():
    keys = torch.ones(1, 1, 4).expand(2**31 - 1, 1, 4)
    with pytest.raises(RuntimeError, match="k_pages has 2147483647 elements on axis 1"):
        attend(keys, [2**31 - 1], kv_lo=[2**31 - 70])


def test_chain_bias_must_have_the_columns_of_the_chains():
    chains = torch.zeros(2, 7, dtype=torch.int32)
    attend(torch.ones(1, 1, 4), [1, 1], chains=chains, bias=bias_of(2, 0, 7))
    with pytest.raises(RuntimeError, match=r"chain_buckets has the shape \[2, 6\], not \[2, 7\]"):
        attend(torch.ones(1, 1, 4), [1, 1], chains=chains, bias=bias_of(2, 0, 6))


@pytest.mark.parametrize("position", [-(2**63), -REACH - 1, REACH + 1, 2**63 - 1])
def test_a_distance_outside_the_table_is_refused(position):
    with pytest.raises(RuntimeError, match="row 0 sees a key farther away than 5"):
        attend(torch.ones(1, 1, 4), [1], bias=bias_of(1, position, 0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"columns": [2**63 - 1]}, "records have 2 columns"),
        ({"columns": [-1]}, "records have 2 columns"),
        ({"num_dense": [2**63 - 1]}, "records have 2 columns"),
        ({"num_dense": [-(2**63)]}, "records have 2 columns"),
        ({"offsets": [2**63 - 1]}, "does not fit out at"),
        ({"offsets": [-1]}, "does not fit out at"),
    ],
)
def test_embedding_terms_outside_the_records_or_rows_are_refused(change, says):
    given = {"columns": [0], "num_dense": [0], "offsets": [0], **change}
    records, out = torch.zeros(1, 2, dtype=torch.int64), torch.empty(1, 4)
    with pytest.raises(RuntimeError, match=says):
        torch.ops.engine.embed(records, [torch.ones(3, 4)], *given.values(), 1, 1.0, out)


def test_pages_behind_the_last_row_of_a_chunk_are_refused():
    pages, chunk = torch.ones(2, 4), torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="do not fit in a chunk of 2"):
        torch.ops.engine.gather_pages(pages, ints([0]), chunk, 2**63 - 1)
    with pytest.raises(RuntimeError, match="do not fit in a chunk of 2"):
        torch.ops.engine.scatter_pages(chunk, 2**63 - 1, ints([0]), pages)


def test_times_farther_apart_than_an_int64_are_in_the_last_bucket():
    near, far = 2**63 - 1, -(2**63)
    next_time = torch.tensor([near, far, 0])
    time = torch.tensor([[far, near, 0, far + 1]])
    buckets = torch.empty(3, TILE, dtype=torch.uint8)
    torch.ops.engine.time_buckets(
        next_time, time, ints([0, 3]), torch.tensor(bucket_edges()), buckets
    )
    expected = [[128, 0, 128, 128], [0, 128, 128, 0], [128, 128, 0, 128]]
    assert buckets[:, :4].tolist() == expected
    assert time_buckets(next_time[:, None], time).tolist() == expected


@pytest.mark.parametrize("key", [0, 3, 11, 15, 40])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("score", ["silu", "softmax"])
def test_a_visible_nan_is_not_lost(score, heads, key):
    keys = torch.randn(64, heads, 4, generator=torch.Generator().manual_seed(key))
    keys[key] = torch.nan
    values = torch.ones(64, heads, 3)
    out = attend(keys, [key, key + 1, 64], values=values, score=score)
    expected = attend(keys[:key], [key], values=values[:key], score=score) if key else 0.0
    assert torch.equal(out[:1], torch.as_tensor(expected).expand_as(out[:1]))
    assert out[1:].isnan().all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("num_rows", [2, 3, 30])
@pytest.mark.parametrize("num_keys", [64, 2100])
@pytest.mark.parametrize("score", ["silu", "softmax"])
def test_a_value_that_is_not_finite_stays_with_the_rows_that_see_it(
    score, num_keys, num_rows, broken
):
    generator = torch.Generator().manual_seed(num_keys)
    keys = torch.randn(num_keys, 2, 64, generator=generator)
    values = torch.randn(num_keys, 2, 64, generator=generator)
    sound = attend(keys, [30, 20, *[10] * (num_rows - 2)], values=values, score=score)
    values[30] = broken
    seen = [30, num_keys, *[10] * (num_rows - 2)]
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = attend(keys, seen, values=values, score=score)
        assert torch.equal(out[0], sound[0])
        assert torch.equal(out[2:], sound[2:])
        assert not out[1].isfinite().any()
    torch.set_num_threads(before)


def test_infinite_scores_count_for_nothing_or_for_everything():
    keys, values = torch.zeros(2048, 1, 1), torch.full((2048, 1, 1), 7.0)
    keys[:1500], values[:1500] = -torch.inf, 3.0
    out = attend(keys, [2048, 1501, 40], values=values, score="softmax")
    assert torch.equal(out[:2], torch.full((2, 1, 1), 7.0))
    keys[0] = torch.inf
    assert attend(keys, [2048], values=values, score="softmax").isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_of_large_negative_scores_is_zero(dtype):
    keys = torch.tensor([-1e30, -1e38, -200.0, 3.0]).view(4, 1, 1)
    q, k = torch.ones(1, 1, 1, dtype=dtype), keys.to(dtype)
    pages, step = k[None], [ints([0, 1]), ints([0]), ints([4]), ints([[0]])]
    attended = torch.empty(1, 1, 1)
    torch.ops.engine.attention(
        q, k[:1], k[:1], pages, torch.ones_like(pages), *step, ints([]), ints([[]]),
        *[None] * 6, 1.0, 1.0, False, attended, None,
    )  # fmt: skip
    assert attended.item() == pytest.approx(3.0 / (1.0 + 2.718281828**-3.0), rel=1e-2)
