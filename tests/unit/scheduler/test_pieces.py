"""How requests are cut: literal row ranges."""

import pytest

from engine.scheduler.pieces import ends_request, shape_piece


def shape(entry, *, start=0, max_rows=100, max_history_rows=100, needs_suffix=False):
    return shape_piece(
        entry,
        entry.prepared,
        start=start,
        max_rows=max_rows,
        max_history_rows=max_history_rows,
        needs_suffix=needs_suffix,
    )


def test_short_request_is_one_piece(make_entry):
    entry = make_entry(length=10, candidates=4)
    piece = shape(entry)
    assert (piece.start, piece.stop, piece.suffix.tolist()) == (0, 10, [0, 1, 2, 3])
    assert ends_request(entry, entry.prepared, piece)


def test_history_is_cut_at_the_budget_and_takes_no_suffix(make_entry):
    entry = make_entry(length=30, candidates=4)
    piece = shape(entry, start=5, max_history_rows=8)
    assert (piece.start, piece.stop, piece.suffix.tolist()) == (5, 13, [])
    assert not ends_request(entry, entry.prepared, piece)


def test_suffix_is_cut_into_whole_chains_with_the_fixed_row(make_entry):
    entry = make_entry(length=10, candidates=6, fixed=1, chain_size=2)
    piece = shape(entry, start=10, max_rows=4)
    assert piece.suffix.tolist() == [0, 1, 2]
    assert not ends_request(entry, entry.prepared, piece)
    entry.suffix_done = 2
    piece = shape(entry, start=10, max_rows=6)
    assert piece.suffix.tolist() == [0, 3, 4, 5, 6]
    assert ends_request(entry, entry.prepared, piece)


def test_full_hit_without_room_for_a_chain_waits(make_entry):
    entry = make_entry(length=10, candidates=6, fixed=1, chain_size=2)
    assert shape(entry, start=10, max_rows=2) is None


def test_history_without_room_waits(make_entry):
    entry = make_entry(length=10, candidates=6)
    assert shape(entry, start=3, max_rows=0) is None


def test_private_rows_come_with_suffix_or_not_at_all(make_entry):
    entry = make_entry(length=10, candidates=6)
    assert shape(entry, start=8, max_rows=2, max_history_rows=None, needs_suffix=True) is None
    piece = shape(entry, start=8, max_rows=4, max_history_rows=None, needs_suffix=True)
    assert (piece.start, piece.stop, piece.suffix.tolist()) == (8, 10, [0, 1])


def test_uncut_history_does_not_come_in_parts(make_entry):
    entry = make_entry(length=10, candidates=6)
    assert shape(entry, max_rows=9, max_history_rows=None) is None
    piece = shape(entry, max_rows=10, max_history_rows=None)
    assert (piece.stop, piece.suffix.tolist()) == (10, [])


def test_prefetch_of_a_full_hit_has_no_rows_and_ends(make_entry):
    entry = make_entry(length=10, candidates=0)
    piece = shape(entry, start=10)
    assert piece.num_rows == 0
    assert ends_request(entry, entry.prepared, piece)


def test_retrieve_reads_only_the_provisional_row(make_entry):
    entry = make_entry(length=9, candidates=0, fixed=1, read_row=0)
    piece = shape(entry, start=9)
    assert piece.suffix.tolist() == [0]
    assert ends_request(entry, entry.prepared, piece)


@pytest.mark.parametrize(
    ("start", "stop", "suffix", "pairs"), [(0, 3, 0, 6), (2, 4, 0, 7), (4, 4, 2, 8)]
)
def test_pairs_count_causal_keys(make_entry, start, stop, suffix, pairs):
    entry = make_entry(length=4, candidates=suffix)
    piece = shape(entry, start=start, max_rows=stop - start + suffix)
    assert (piece.stop, piece.num_pairs(4)) == (stop, pairs)
