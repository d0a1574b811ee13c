"""The rolling fingerprint, against xxh3 written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from engine.block_manager.fingerprint import HashChain, match
from engine.errors import InvariantError


def records(length: int, width: int = 3) -> np.ndarray:
    return np.arange(length * width, dtype=np.int64).reshape(length, width)


def test_boundaries_chain_the_hash_of_each_page() -> None:
    rows = records(10)
    chain = HashChain.from_records(rows, b"seed", 4)
    first = xxh3_64_intdigest(rows[:4].tobytes(), xxh3_64_intdigest(b"seed"))
    second = xxh3_64_intdigest(rows[4:8].tobytes(), first)
    assert chain.length == 10
    assert chain.boundaries.tolist() == [first, second]
    assert chain.at(0) == xxh3_64_intdigest(b"seed")
    assert chain.at(4) == first
    assert chain.at(8) == second
    assert chain.at(10) == xxh3_64_intdigest(rows[8:].tobytes(), second)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8])
def test_a_longer_history_has_the_same_hashes_as_its_prefix(length: int) -> None:
    whole = HashChain.from_records(records(11), b"", 4)
    part = HashChain.from_records(records(11)[:length], b"", 4)
    assert part.boundaries.tolist() == whole.boundaries[: length // 4].tolist()
    assert [part.at(i) for i in range(length + 1)] == [whole.at(i) for i in range(length + 1)]


def test_every_changed_input_changes_every_later_hash() -> None:
    base = HashChain.from_records(records(12), b"seed", 4)
    for row in range(12):
        for column in range(3):
            changed = records(12)
            changed[row, column] += 1
            other = HashChain.from_records(changed, b"seed", 4)
            same = [base.at(i) == other.at(i) for i in range(13)]
            assert same == [True] * (row + 1) + [False] * (12 - row)


def test_another_seed_is_another_history() -> None:
    left = HashChain.from_records(records(9), b"profile 1", 4)
    right = HashChain.from_records(records(9), b"profile 2", 4)
    assert all(left.at(i) != right.at(i) for i in range(10))


def test_records_need_not_be_contiguous() -> None:
    rows = records(8, 4)[:, ::2]
    expected = HashChain.from_records(rows.copy(), b"", 4)
    assert HashChain.from_records(rows, b"", 4).boundaries.tolist() == expected.boundaries.tolist()


@pytest.mark.parametrize("length", [-1, 11])
def test_asking_beyond_the_history_is_refused(length: int) -> None:
    chain = HashChain.from_records(records(10), b"", 4)
    with pytest.raises(InvariantError, match=f"at {length} of a history of 10"):
        chain.at(length)


def matched(known: np.ndarray, history: np.ndarray) -> tuple[int, bool, bool]:
    state = HashChain.from_records(known, b"", 4)
    chain = HashChain.from_records(history, b"", 4)
    return match(state.boundaries, state.length, state.at(state.length), chain)


@pytest.mark.parametrize(
    ("known", "length", "expected"),
    [
        (8, 8, (8, False, False)),
        (8, 11, (8, False, False)),
        (10, 10, (10, False, False)),
        (10, 14, (10, False, False)),
        (0, 5, (0, False, False)),
        (10, 9, (8, True, False)),
        (10, 8, (8, True, False)),
        (10, 7, (4, True, False)),
        (10, 3, (0, True, False)),
        (10, 0, (0, True, False)),
        (8, 5, (4, True, False)),
    ],
)
def test_match_of_a_history_that_only_grew_or_shrank(
    known: int, length: int, expected: tuple[int, bool, bool]
) -> None:
    assert matched(records(known), records(length)) == expected


@pytest.mark.parametrize(
    ("known", "length", "edited", "expected"),
    [
        (10, 14, 9, (8, False, True)),
        (10, 10, 8, (8, False, True)),
        (10, 14, 5, (4, False, True)),
        (10, 14, 0, (0, False, True)),
        (8, 8, 7, (4, False, True)),
        (12, 9, 6, (4, False, True)),
        (12, 9, 8, (8, True, False)),
        (12, 3, 1, (0, True, False)),
    ],
)
def test_match_of_an_edited_history_keeps_whole_pages(
    known: int, length: int, edited: int, expected: tuple[int, bool, bool]
) -> None:
    history = records(length)
    history[edited, 1] = -1
    assert matched(records(known), history) == expected
