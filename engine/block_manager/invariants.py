"""Recounts the whole bookkeeping from its owners. Used when idle and by tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from engine.block_manager.accounts import VersionAccounts
from engine.block_manager.page_pool import NO_IDS, RefPool
from engine.block_manager.reservation import Reservation
from engine.block_manager.tiers import Tiers
from engine.block_manager.user_state import Residency, UserState
from engine.errors import InvariantError
from engine.types import Int32Array, Int64Array


def check(tiers: Tiers, reservations: Sequence[Reservation], *, idle: bool) -> None:
    """Raise InvariantError with the first thing that is wrong. O(users + pages + chunks)."""
    states = list(tiers.states.values())
    for key, state in tiers.states.items():
        _require(state.key == key and state.is_attached, f"{key} finds a state of {state.key}")
        _check_state(tiers, state)
    for state in tiers.leaving:
        is_held = state.residency is Residency.DETACHED
        gone = state.num_chunks == state.device_len == state.host_len == 0
        _require(
            gone and (is_held or state.num_pages == 0),
            f"{state.key} is detached and still holds something",
        )
        _require(
            is_held or tiers.copies.is_copying(state),
            f"{state.key} is {state.residency.value} and nothing touches it",
        )
    _check_held(states, list(tiers.leaving), reservations)
    records = list(tiers.copies.records())
    own_pages = [reservation.block_table[reservation.num_shared :] for reservation in reservations]
    job_pages = [job.pages for job, _ in records]
    job_chunks = [record.chunks for _, record in records]
    state_pages = [state.pages for state in (*states, *tiers.leaving)]
    state_chunks = [state.chunks for state in states]
    _check_pool(tiers.pages, "page", [*state_pages, *own_pages, *job_pages])
    _check_pool(tiers.chunks.pool, "chunk", [*state_chunks, *job_chunks])
    _check_accounts(tiers, reservations)
    _check_unshared("page", [*state_pages, *own_pages])
    _check_unshared("chunk", state_chunks)
    if idle:
        _require(not reservations, f"{len(reservations)} pieces are held at idle")
        _require(not records, f"{len(records)} copies are in flight at idle")
        _require(not tiers.leaving, f"{len(tiers.leaving)} detached states are left at idle")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise InvariantError(what)


def _check_state(tiers: Tiers, state: UserState) -> None:
    layout, name = tiers.layout, f"{state.key}"
    is_pinned = state.residency is Residency.PINNED
    _require(is_pinned or state.num_pages > 0 or state.num_chunks > 0, f"{name} holds nothing")
    _require(state.num_pages == layout.pages_for(state.device_len), f"{name}: pages, device_len")
    _require(state.host_len % layout.page_size == 0, f"{name}: host_len {state.host_len}")
    _require(state.offload_len % layout.page_size == 0, f"{name}: offload_len")
    _require(state.host_len <= state.offload_len, f"{name}: host_len above offload_len")
    _require(
        state.num_chunks == layout.chunks_for(state.offload_len), f"{name}: chunks, offload_len"
    )
    _require(
        state.device_len % layout.page_size == 0 or state.device_len == state.length,
        f"{name}: device_len {state.device_len} ends inside a page below {state.length}",
    )
    _require(state.used_len <= state.device_len, f"{name}: used_len above device_len")
    _require(state.num_hashes == layout.full_pages(state.length), f"{name}: hashes, length")
    if state.offload_len > state.host_len:
        offered = any(
            record.state is state and job.branch == state.branch
            for job, record in tiers.copies.records()
        )
        _require(offered, f"{name}: offload_len above host_len and no offload in flight")
    _require(
        (state in state.accounts.device.order) == (is_pinned or state.num_pages > 0),
        f"{name}: place in the device order",
    )
    _require(
        (state in state.accounts.host.order) == (is_pinned or state.num_chunks > 0),
        f"{name}: place in the host order",
    )


def _check_held(
    states: Sequence[UserState],
    leaving: Sequence[UserState],
    reservations: Sequence[Reservation],
) -> None:
    held = {reservation.state for reservation in reservations}
    _require(len(held) == len(reservations), "two pieces hold one state")
    for state in states:
        is_pinned = state.residency is Residency.PINNED
        _require((state in held) == is_pinned, f"{state.key}: {state.residency.value}")
    for state in leaving:
        is_detached = state.residency is Residency.DETACHED
        _require((state in held) == is_detached, f"{state.key}: {state.residency.value}")
    _require(all(reservation.is_open for reservation in reservations), "an ended piece is kept")
    for reservation in reservations:
        shared = reservation.block_table[: reservation.num_shared]
        _require(
            np.array_equal(shared, reservation.state.pages[: reservation.num_shared]),
            f"{reservation.key}: a piece reads pages that its state does not hold",
        )


def _check_pool(pool: RefPool, name: str, owners: Iterable[Int32Array]) -> None:
    """Counts equal the owners', and free + referenced == all."""
    expected = _num_owners(owners, pool.size)
    counts = pool.counts()
    if not np.array_equal(counts, expected):
        wrong = int(np.flatnonzero(counts != expected)[0])
        raise InvariantError(
            f"{name} {wrong} has count {counts[wrong]} and {expected[wrong]} owners"
        )
    free = np.sort(pool.free_ids())
    if not np.array_equal(free, np.flatnonzero(expected == 0)):
        raise InvariantError(
            f"{len(free)} free and {int((expected > 0).sum())} referenced {name}s of {pool.size}"
        )


def _check_accounts(tiers: Tiers, reservations: Sequence[Reservation]) -> None:
    """Each account is what its version's states, pieces and copies hold, each id counted once."""
    records = list(tiers.copies.records())
    pages: dict[VersionAccounts, list[Int32Array]] = {entry: [] for entry in tiers.ledger}
    chunks: dict[VersionAccounts, list[Int32Array]] = {entry: [] for entry in tiers.ledger}
    owners = [*tiers.states.values(), *tiers.leaving]
    for state in owners:
        accounts = state.accounts
        _require(accounts.version == state.key.weights_version, f"{state.key}: other accounts")
        _require(accounts in pages, f"{state.key}: its accounts are closed")
        pages[accounts].append(state.pages)
        chunks[accounts].append(state.chunks)
    for reservation in reservations:
        pages[reservation.state.accounts].append(reservation.block_table)
    for job, record in records:
        pages[record.state.accounts].append(job.pages)
        chunks[record.state.accounts].append(record.chunks)
    for accounts in tiers.ledger:
        name = f"version {accounts.version!r}"
        for used, ids, what in (
            (accounts.device.used, pages[accounts], "pages"),
            (accounts.host.used, chunks[accounts], "chunks"),
        ):
            counted = np.count_nonzero(_num_owners(ids))
            _require(used == counted, f"{name}: {used} {what} on its account, {counted} are held")
        states = [state for state in tiers.states.values() if state.accounts is accounts]
        num_leaving = sum(state.accounts is accounts for state in tiers.leaving)
        _require(
            (accounts.num_states, accounts.num_leaving) == (len(states), num_leaving),
            f"{name}: {accounts.num_states} + {accounts.num_leaving} states on its account, "
            f"{len(states)} are found and {num_leaving} leave",
        )
        listed = len(accounts.device.order) + len(accounts.host.order)
        expected = sum(
            (state in accounts.device.order) + (state in accounts.host.order) for state in states
        )
        _require(listed == expected, f"{name}: its orders list states that cannot be found")
    _require(
        sum(entry.device.used for entry in tiers.ledger) == tiers.pages.num_used
        and sum(entry.host.used for entry in tiers.ledger) == tiers.chunks.pool.num_used,
        "the accounts do not add up to what is in use",
    )


def _check_unshared(name: str, owners: Sequence[Int32Array]) -> None:
    shared = np.flatnonzero(_num_owners(owners) > 1)
    if len(shared):
        raise InvariantError(f"{name} {shared[0]} belongs to two users")


def _num_owners(owners: Iterable[Int32Array], size: int = 0) -> Int64Array:
    """How many of these hold each id, for the ids up to the highest and at least `size`."""
    return np.bincount(np.concatenate((NO_IDS, *owners)), minlength=size)
