"""The recount finds what is wrong, whatever it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from block_harness import Blocks, key_of

from engine.block_manager.user_state import UserState
from engine.errors import InvariantError


def state_of(blocks: Blocks, user: str) -> UserState:
    return blocks.manager._tiers.states[key_of(user)]


def leak_a_page(blocks: Blocks) -> None:
    blocks.manager._tiers.pages.allocate(1, state_of(blocks, "a").accounts.device)


def leak_a_chunk(blocks: Blocks) -> None:
    blocks.manager._tiers.chunks.pool.allocate(1, state_of(blocks, "a").accounts.host)


def lose_a_page(blocks: Blocks) -> None:
    state = state_of(blocks, "a")
    blocks.manager._tiers.pages.release(state.pages[:1], state.accounts.device)


def share_a_page(blocks: Blocks) -> None:
    page = state_of(blocks, "b").pages[:1].copy()
    state = state_of(blocks, "a")
    blocks.manager._tiers.pages.release(state.pages[:1], state.accounts.device)
    state.pages[:1] = page
    blocks.manager._tiers.pages.retain(page)


def shift_device_len(blocks: Blocks) -> None:
    state_of(blocks, "a").device_len += 4


def end_inside_a_page(blocks: Blocks) -> None:
    state_of(blocks, "a").host_len = 6


def claim_the_host(blocks: Blocks) -> None:
    state_of(blocks, "a").host_len = 12


def claim_an_offload(blocks: Blocks) -> None:
    state = state_of(blocks, "a")
    state.host_len -= 4


def lose_a_hash(blocks: Blocks) -> None:
    state_of(blocks, "a").cut_hashes(1)


def invent_a_hash(blocks: Blocks) -> None:
    state_of(blocks, "a").append_hashes(np.zeros(1, dtype=np.uint64))


def leave_the_device_order(blocks: Blocks) -> None:
    state = state_of(blocks, "a")
    state.accounts.device.order.remove(state)


def leave_the_host_order(blocks: Blocks) -> None:
    state = state_of(blocks, "a")
    state.accounts.host.order.remove(state)


def change_its_key(blocks: Blocks) -> None:
    state_of(blocks, "a").key = key_of("z")


def miscount_pages(blocks: Blocks) -> None:
    state_of(blocks, "a").accounts.device.used += 1


def miscount_chunks(blocks: Blocks) -> None:
    state_of(blocks, "a").accounts.host.used -= 1


def book_pages_on_another_version(blocks: Blocks) -> None:
    accounts = blocks.manager._tiers.ledger.of("v2")
    state = state_of(blocks, "a")
    state.accounts.device.used -= state.num_pages
    accounts.device.used += state.num_pages


def move_to_another_version(blocks: Blocks) -> None:
    state_of(blocks, "a").accounts = blocks.manager._tiers.ledger.of("v2")


def miscount_states(blocks: Blocks) -> None:
    state_of(blocks, "a").accounts.num_states += 1


def miscount_leaving_states(blocks: Blocks) -> None:
    state_of(blocks, "a").accounts.num_leaving += 1


def list_a_state_that_is_gone(blocks: Blocks) -> None:
    state = state_of(blocks, "a")
    blocks.manager.forget(("", "a"))
    state.accounts.host.order.touch(state)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (leak_a_page, "page 6 has count 1 and 0 owners"),
        (leak_a_chunk, "chunk 2 has count 1 and 0 owners"),
        (lose_a_page, "page 0 has count 0 and 1 owners"),
        (share_a_page, "page 3 belongs to two users"),
        (shift_device_len, "pages, device_len"),
        (end_inside_a_page, "host_len 6"),
        (claim_the_host, "host_len above offload_len"),
        (claim_an_offload, "no offload in flight"),
        (lose_a_hash, "hashes, length"),
        (invent_a_hash, "hashes, length"),
        (leave_the_device_order, "place in the device order"),
        (leave_the_host_order, "place in the host order"),
        (change_its_key, "finds a state of"),
        (miscount_pages, "'v1': 7 pages on its account, 6 are held"),
        (miscount_chunks, "'v1': 1 chunks on its account, 2 are held"),
        (book_pages_on_another_version, "'v1': 3 pages on its account, 6 are held"),
        (move_to_another_version, "place in the device order"),
        (miscount_states, r"'v1': 3 \+ 0 states on its account, 2 are found and 0 leave"),
        (miscount_leaving_states, r"'v1': 2 \+ 1 states on its account, 2 are found and 0 leave"),
        (list_a_state_that_is_gone, "its orders list states that cannot be found"),
    ],
)
def test_a_spoiled_book_is_noticed(spoil: Callable[[Blocks], None], message: str) -> None:
    blocks = Blocks()
    for user in "ab":
        blocks.serve(user, 10)
    blocks.drain()
    blocks.check()
    spoil(blocks)
    with pytest.raises(InvariantError, match=message):
        blocks.check()


def test_a_piece_that_reads_pages_of_nobody_is_noticed(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    reservation = blocks.must_plan("a", 10)
    blocks.check(idle=False)
    reservation.block_table[1] = 9
    with pytest.raises(InvariantError, match="reads pages that its state does not hold"):
        blocks.check(idle=False)


def test_what_is_held_is_no_idle(blocks: Blocks) -> None:
    reservation = blocks.must_plan("a", 10)
    blocks.check(idle=False)
    with pytest.raises(InvariantError, match="1 pieces are held at idle"):
        blocks.check()
    blocks.commit(reservation)
    with pytest.raises(InvariantError, match="1 copies are in flight at idle"):
        blocks.check()
