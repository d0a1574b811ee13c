"""Which tiles the torch backend computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention_backends.base import AttentionBatch
from engine.attention_backends.tile_plan import HiddenPairs, plan_step


def _batch(*requests):
    """requests: (lo [n], hi [n], pages)."""
    counts = [len(request[0]) for request in requests]
    width = max(len(request[2]) for request in requests)
    table = np.full((len(requests), width), 99, np.int32)
    for row, request in zip(table, requests, strict=True):
        row[: len(request[2])] = request[2]
    none = torch.zeros(0, dtype=torch.int64)
    return AttentionBatch(
        row_indptr=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        kv_lo=torch.tensor(np.concatenate([r[0] for r in requests]), dtype=torch.int32),
        kv_hi=torch.tensor(np.concatenate([r[1] for r in requests]), dtype=torch.int32),
        block_table=torch.from_numpy(table),
        append_rows=none,
        slot_mapping=none,
        suffix_rows=none,
        suffix_chain=none.view(0, 1),
    )


def _plan(*requests, tiles=32, group=1000):
    return plan_step(_batch(*requests), 16, max_block_tiles=tiles, max_group_tiles=group)


def test_causal_history_computes_the_lower_triangle_of_tiles():
    position = np.arange(256)
    [group] = _plan((np.zeros(256), position + 1, range(16)))
    [block] = group.blocks
    assert block.active == [4, 3, 2, 1]
    assert block.key_tiles[:, 0].tolist() == [0, 1, 2, 3]
    hidden = [pair for pair in block.partial if pair is not None]
    assert len(hidden) == 4
    assert all(isinstance(pair.tiles, slice) and len(pair.hidden) == 1 for pair in hidden)
    assert hidden[-1].hidden[0, 0].logical_not().sum() == 64 * 65 // 2


def test_whole_tiles_have_no_mask():
    [group] = _plan((np.zeros(64), np.full(64, 128), range(8)))
    assert group.blocks[0].partial == [None, None]


def test_window_skips_tiles_before_it():
    [group] = _plan((np.full(3, 130), np.full(3, 190), range(12)))
    [block] = group.blocks
    assert block.active == [1]
    assert block.first_position.tolist() == [[128]]
    assert group.page.shape == (1, 64)


def test_places_that_no_row_sees_read_a_visible_slot():
    [group] = _plan((np.array([70]), np.array([75]), [5, 6, 7, 8, 9]))
    slots = (group.page * 16 + group.offset)[0].tolist()
    visible = [9 * 16 + offset for offset in (6, 7, 8, 9, 10)]
    assert slots[6:11] == visible
    assert set(slots) == set(visible)


def test_rows_without_visible_keys_make_no_tiles():
    assert _plan((np.array([3, 5]), np.array([3, 2]), [0])) == []


def test_step_without_rows_makes_no_tiles():
    assert _plan((np.zeros(0), np.zeros(0), [0])) == []


@pytest.mark.parametrize(("group", "expected"), [(1, [1, 2, 3]), (3, [3, 3]), (100, [6])])
def test_requests_are_grouped_by_their_key_tiles(group, expected):
    requests = [
        (np.zeros(1), np.array([64 * count]), range(100, 100 + 4 * count)) for count in (1, 2, 3)
    ]
    groups = _plan(*requests, group=group)
    assert [len(plan.page) for plan in groups] == expected


def test_longest_query_tiles_come_first_and_blocks_are_bounded():
    requests = [(np.zeros(1), np.array([64 * count]), range(4 * count)) for count in (1, 3, 2)]
    [group] = _plan(*requests, tiles=2)
    assert [block.active for block in group.blocks] == [[2, 2, 1], [1]]
    assert [block.requests.tolist() for block in group.blocks] == [[1, 2], [0]]


def test_mask_of_scattered_tiles_names_them():
    requests = [(np.zeros(1), np.array([hi]), range(8)) for hi in (128, 100, 128, 99)]
    [group] = _plan(*requests)
    pair = group.blocks[0].partial[1]
    assert isinstance(pair, HiddenPairs)
    assert pair.tiles.tolist() == [1, 3]
    assert pair.hidden[0, 0, 0].sum() == 28
