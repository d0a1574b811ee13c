"""gather_pages and scatter_pages: the native operators against their slow twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.native_library import load_library
from engine.transfer.pages import (
    gather_pages,
    gather_pages_reference,
    scatter_pages,
    scatter_pages_reference,
)

NUM_PAGES, NUM_ROWS = 9, 8


def _random(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-100, 100, (rows, width)).to(dtype)


@given(
    page_ids=st.lists(st.integers(0, NUM_PAGES - 1), max_size=NUM_ROWS),
    first=st.integers(0, NUM_ROWS),
    width=st.integers(1, 33),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
)
def test_native_and_reference_write_the_same_bytes(page_ids, first, width, dtype):
    first = min(first, NUM_ROWS - len(page_ids))
    ids = torch.tensor(page_ids, dtype=torch.int32)
    pages, chunk = _random(NUM_PAGES, width, dtype), _random(NUM_ROWS, width, dtype)
    gathered, gathered_reference = chunk.clone(), chunk.clone()
    gather_pages(pages, ids, gathered, first)
    gather_pages_reference(pages, ids, gathered_reference, first)
    assert torch.equal(gathered, gathered_reference)
    scattered, scattered_reference = pages.clone(), pages.clone()
    scatter_pages(chunk, first, ids, scattered)
    scatter_pages_reference(chunk, first, ids, scattered_reference)
    assert torch.equal(scattered, scattered_reference)


def test_gather_copies_the_named_pages_to_their_rows():
    pages = torch.arange(8, dtype=torch.uint8).reshape(4, 2)
    chunk = torch.full((4, 2), 99, dtype=torch.uint8)
    gather_pages(pages, torch.tensor([3, 0], dtype=torch.int32), chunk, 1)
    assert chunk.tolist() == [[99, 99], [6, 7], [0, 1], [99, 99]]


def test_scatter_copies_rows_to_the_named_pages():
    pages = torch.full((4, 2), 99, dtype=torch.uint8)
    chunk = torch.arange(8, dtype=torch.uint8).reshape(4, 2)
    scatter_pages(chunk, 1, torch.tensor([3, 0], dtype=torch.int32), pages)
    assert pages.tolist() == [[4, 5], [99, 99], [99, 99], [2, 3]]


def _gather_arguments(**changes):
    arguments = {
        "pages": torch.zeros(4, 2, dtype=torch.uint8),
        "ids": torch.tensor([1, 2], dtype=torch.int32),
        "chunk": torch.zeros(4, 2, dtype=torch.uint8),
        "first": 0,
    } | changes
    return arguments["pages"], arguments["ids"], arguments["chunk"], arguments["first"]


@pytest.mark.parametrize("gather", [gather_pages, gather_pages_reference])
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"ids": torch.tensor([1, 4], dtype=torch.int32)}, r"page_ids\[1\] is 4"),
        ({"ids": torch.tensor([-1], dtype=torch.int32)}, r"page_ids\[0\] is -1"),
        ({"ids": torch.tensor([1, 2])}, "page_ids"),
        ({"first": 3}, "2 rows from 3 on do not fit in a chunk of 4"),
        ({"first": -1}, "do not fit"),
        ({"chunk": torch.zeros(4, 3, dtype=torch.uint8)}, "widths are 2 and 3"),
        ({"chunk": torch.zeros(4, 2, dtype=torch.float32)}, "one dtype"),
        ({"chunk": torch.zeros(2, 4, dtype=torch.uint8).T}, "contiguous"),
        ({"pages": torch.zeros(8, dtype=torch.uint8)}, "two-dimensional"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(gather, changes, word):
    pages, ids, chunk, first = _gather_arguments(**changes)
    with pytest.raises(RuntimeError, match=word):
        gather(pages + 1, ids, chunk, first)
    assert not chunk.any()


@pytest.mark.skipif(load_library() is not None, reason=f"native library: {load_library()}")
def test_operators_have_a_true_schema_and_a_fake():
    ids = torch.tensor([3, 0], dtype=torch.int32)
    pages, chunk = _random(4, 2, torch.float32), _random(4, 2, torch.float32)
    gather_pages(pages, ids, chunk, 0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.engine.gather_pages.default, (pages, ids, chunk, 1), test_utils=checks
    )
    torch.library.opcheck(
        torch.ops.engine.scatter_pages.default, (chunk, 1, ids, pages), test_utils=checks
    )
