"""Reservations for a history that is known only from its base on."""

import numpy as np
import pytest
from block_harness import Blocks, key_of

from engine.block_manager.fingerprint import HashChain
from engine.errors import InvariantError


def delta_chain(blocks, length, base_pages, base_hash=None):
    """The chain of events 0, 1, ... `length`, those below the base not known."""
    whole = blocks.chain(length)
    records = np.arange(length, dtype=np.int64).reshape(length, 1)
    records[: base_pages * blocks.page_size] = 0
    if base_hash is None:
        base_hash = whole.at(base_pages * blocks.page_size)
    return HashChain.from_records(
        records, b"", blocks.page_size, base_pages=base_pages, base_hash=base_hash
    )


def test_rows_after_the_base_extend_the_state_as_the_whole_history_does():
    blocks = Blocks()
    blocks.serve("a", 10)
    chain = delta_chain(blocks, 14, 2)
    reservation = blocks.manager.reserve(key_of("a"), chain, stop=14, protected=())
    assert (reservation.start, reservation.stop) == (10, 14)
    blocks.manager.commit(reservation)
    assert blocks.user("a").length == 14
    assert blocks.user("a").fingerprint == blocks.chain(14).at(14)
    assert blocks.lookup("a", 16).matched == 14, "a whole history finds all of it"


@pytest.mark.parametrize("known", [0, 7])
def test_reserving_without_the_base_is_a_bug(known):
    blocks = Blocks()
    if known:
        blocks.serve("a", known)
    chain = delta_chain(blocks, 14, 2)
    assert blocks.manager.lookup(key_of("a"), chain).matched == 0
    with pytest.raises(InvariantError, match="0 tokens of user 'a' match"):
        blocks.manager.reserve(key_of("a"), chain, stop=14, protected=())


def test_reserving_on_a_wrong_base_does_not_cut_the_state():
    blocks = Blocks()
    blocks.serve("a", 10)
    before = blocks.user("a")
    chain = delta_chain(blocks, 14, 2, base_hash=1)
    with pytest.raises(InvariantError, match="its base of 8"):
        blocks.manager.reserve(key_of("a"), chain, stop=14, protected=())
    assert blocks.user("a") == before
