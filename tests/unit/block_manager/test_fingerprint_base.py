"""Chains that begin at the base of a delta request."""

from __future__ import annotations

import numpy as np
import pytest

from engine.block_manager.fingerprint import BaseFingerprint, HashChain, match
from engine.errors import InvalidRequest, InvariantError


def records(length: int, width: int = 3) -> np.ndarray:
    return np.arange(length * width, dtype=np.int64).reshape(length, width)


def whole(length: int, seed: bytes = b"seed") -> HashChain:
    return HashChain.from_records(records(length), seed, 4)


def delta(length: int, base_pages: int, *, of: int = 99, seed: bytes = b"seed") -> HashChain:
    """The chain of a delta: `length` records of which those below the base are zeros."""
    rows = records(length)
    rows[: 4 * base_pages] = 0
    base_hash = whole(of, seed).at(4 * base_pages)
    return HashChain.from_records(rows, seed, 4, base_pages=base_pages, base_hash=base_hash)


@pytest.mark.parametrize("length", [8, 9, 12, 15])
@pytest.mark.parametrize("base_pages", [1, 2])
def test_hashes_from_the_base_on_are_those_of_the_whole_history(
    length: int, base_pages: int
) -> None:
    chain, expected = delta(length, base_pages), whole(length)
    base_len = 4 * base_pages
    assert (chain.base_len, chain.length, chain.seed_hash) == (base_len, length, expected.at(0))
    lengths = range(base_len, length + 1)
    assert [chain.at(i) for i in lengths] == [expected.at(i) for i in lengths]
    got = chain.between(base_pages, length // 4).tolist()
    assert got == expected.boundaries[base_pages:].tolist()


def test_hashes_below_the_base_are_not_told() -> None:
    chain = delta(12, 2)
    with pytest.raises(InvariantError, match="at 7 of a history of 12"):
        chain.at(7)
    with pytest.raises(InvariantError, match="page 1: the history is known from page 2 on"):
        chain.between(1, 3)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (16, (16, False, False)),
        (18, (18, False, False)),
        (20, (20, False, False)),
        (22, (20, True, False)),
        (8, (8, False, False)),
        (9, (9, False, False)),
        (7, (0, False, False)),
        (4, (0, False, False)),
        (0, (0, False, False)),
    ],
)
def test_state_matches_a_delta_only_if_it_reaches_its_base(
    known: int, expected: tuple[int, bool, bool]
) -> None:
    state, chain = whole(known), delta(21, 2)
    assert match(state.boundaries, known, state.at(known), chain) == expected


def test_state_without_the_base_does_not_diverge() -> None:
    other = whole(20, b"another profile")
    assert match(other.boundaries, 20, other.at(20), delta(21, 2)) == (0, False, False)


@pytest.mark.parametrize(
    ("edited", "expected"),
    [(8, (8, False, True)), (13, (12, False, True)), (17, (16, False, True))],
)
def test_state_with_the_base_diverges_where_the_events_sent_differ(
    edited: int, expected: tuple[int, bool, bool]
) -> None:
    rows = records(18)
    rows[edited] = -1
    state = HashChain.from_records(rows, b"seed", 4)
    assert match(state.boundaries, 18, state.at(18), delta(20, 2)) == expected


def test_delta_that_ends_at_its_base_matches_a_longer_state() -> None:
    state = whole(14)
    assert match(state.boundaries, 14, state.at(14), delta(8, 2)) == (8, True, False)


def test_base_fingerprint_is_32_hex_digits_there_and_back() -> None:
    shown = BaseFingerprint(seed=0x1F, boundary=2**64 - 1)
    assert str(shown) == "000000000000001fffffffffffffffff"
    assert BaseFingerprint.parse(str(shown)) == shown


@pytest.mark.parametrize(
    "text", ["", "0", "g" * 32, "A" * 32, "0" * 31, "0" * 33, "0" * 32 + "\n", "+" + "0" * 31]
)
def test_any_other_text_is_refused_as_a_base_fingerprint(text: str) -> None:
    with pytest.raises(InvalidRequest, match="base_fingerprint is"):
        BaseFingerprint.parse(text)
