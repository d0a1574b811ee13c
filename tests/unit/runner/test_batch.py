"""Index arithmetic from pieces to the rows of a step."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import InvariantError
from engine.runner.batch import PieceBias, PieceRows, assemble


def _piece(start, stop, suffix=(), parent=(), pages=(), reads_self=None, bias=None):
    count = stop - start + len(suffix)
    return PieceRows(
        start=start,
        stop=stop,
        suffix=np.array(suffix, np.int64),
        suffix_parent=np.array(parent, np.int32),
        suffix_reads_self=np.array(
            [True] * len(parent) if reads_self is None else reads_self, np.bool_
        ),
        kv_lo=np.arange(count, dtype=np.int32),
        kv_hi=np.arange(count, dtype=np.int32) + 10,
        block_table=np.array(pages, np.int32),
        bias=bias,
    )


def test_rows_are_grouped_by_request_history_first():
    batch = assemble(
        [
            _piece(3, 6, suffix=(0, 1), parent=(-1, -1), pages=(7, 2)),
            _piece(0, 2, pages=(5,)),
            _piece(4, 4, suffix=(2,), parent=(-1, -1, -1), pages=(1,)),
        ],
        page_size=4,
        null_page=9,
    )
    assert batch.row_indptr.tolist() == [0, 5, 7, 8]
    assert batch.kv_lo.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert batch.kv_hi.tolist() == [10, 11, 12, 13, 14, 10, 11, 10]
    assert batch.block_table.tolist() == [[7, 2], [5, 9], [1, 9]]
    assert batch.append_rows.tolist() == [0, 1, 2, 5, 6]
    assert batch.slot_mapping.tolist() == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 20, 21]
    assert batch.suffix_rows.tolist() == [3, 4, 7]
    assert batch.suffix_chain.tolist() == [[0], [1], [2]]
    assert batch.bias is None


def test_chains_are_padded_on_the_left_and_end_with_the_row_itself():
    batch = assemble(
        [
            _piece(0, 0, suffix=(0, 1, 2, 3), parent=(-1, 0, 1, 0)),
            _piece(0, 0, suffix=(0, 1), parent=(-1, -1)),
        ],
        page_size=4,
        null_page=9,
    )
    assert batch.suffix_chain.tolist() == [
        [-1, -1, 0],
        [-1, 0, 1],
        [0, 1, 2],
        [-1, 0, 3],
        [-1, -1, 4],
        [-1, -1, 5],
    ]


def test_chain_of_a_part_of_the_suffix_refers_to_rows_of_the_piece():
    batch = assemble(
        [_piece(0, 0, suffix=(0, 4, 5), parent=(-1, 0, 1, 0, 0, 4))], page_size=4, null_page=9
    )
    assert batch.suffix_chain.tolist() == [[-1, -1, 0], [-1, 0, 1], [0, 1, 2]]


def test_row_that_does_not_read_itself_has_an_empty_chain():
    batch = assemble(
        [_piece(0, 0, suffix=(0, 1), parent=(-1, -1), reads_self=(False, True))],
        page_size=4,
        null_page=9,
    )
    assert batch.suffix_chain.tolist() == [[-1], [1]]


def test_step_without_suffix_has_an_empty_chain_table():
    batch = assemble([_piece(0, 1, pages=(0,))], page_size=4, null_page=9)
    assert batch.suffix_rows.tolist() == []
    assert batch.suffix_chain.shape == (0, 1)


def test_history_of_no_rows_has_a_null_page():
    batch = assemble([_piece(0, 0, suffix=(0,), parent=(-1,))], page_size=4, null_page=9)
    assert batch.block_table.tolist() == [[9]]


def test_cut_chain_is_refused():
    with pytest.raises(InvariantError, match="suffix row 2 runs in a piece without the row 1"):
        assemble([_piece(0, 0, suffix=(0, 2), parent=(-1, 0, 1))], page_size=4, null_page=9)


def test_parent_in_another_request_is_no_parent():
    with pytest.raises(InvariantError, match="chains must not be cut"):
        assemble(
            [
                _piece(0, 0, suffix=(0,), parent=(-1, -1)),
                _piece(0, 0, suffix=(1,), parent=(-1, 0)),
            ],
            page_size=4,
            null_page=9,
        )


def test_missing_pages_are_refused():
    with pytest.raises(InvariantError, match="ends at row 9 but its pages cover 8"):
        assemble([_piece(0, 9, pages=(0, 1))], page_size=4, null_page=9)


def test_bias_times_are_padded_per_request():
    def bias(*times):
        values = np.array(times, np.int64)
        return PieceBias(values + 1, values + 2, values, values[:0], values[:0])

    batch = assemble(
        [_piece(0, 1, pages=(0,), bias=bias(30)), _piece(0, 2, pages=(1,), bias=bias(40, 50))],
        page_size=4,
        null_page=9,
    )
    assert batch.bias is not None
    assert batch.bias.key_time.tolist() == [[30, 0], [40, 50]]
    assert batch.bias.row_position.tolist() == [31, 41, 51]
    assert batch.bias.row_next_time.tolist() == [32, 42, 52]
