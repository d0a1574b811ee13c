"""What the block manager tells about users and versions. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import Literal, NamedTuple

from engine.block_manager.reservation import PoolUsage, VersionUsage
from engine.block_manager.tiers import Tiers
from engine.block_manager.user_state import Residency, UserState, UserView


class UserSummary(NamedTuple):
    """One line of a list of users. Lengths in tokens; last_used_s: monotonic seconds."""

    namespace: str
    user_id: str
    weights_version: str
    device_len: int
    host_len: int
    num_pages: int
    num_chunks: int
    residency: Residency
    last_used_s: float


def view_of(tiers: Tiers, state: UserState) -> UserView:
    """A copy of what is known about one user under one weights version."""
    length = state.length
    is_boundary = length % tiers.layout.page_size == 0
    return UserView(
        device_len=state.device_len,
        host_len=state.host_len,
        length=length,
        fingerprint=int(state.hashes[-1]) if is_boundary and length else state.tail_hash,
        num_pages=state.num_pages,
        num_chunks=state.num_chunks,
        branch=state.branch,
        residency=state.residency,
        is_copying=tiers.copies.is_copying(state),
        weights_version=state.key.weights_version,
        last_used_s=state.last_used_s,
    )


def recent_users(
    tiers: Tiers, limit: int, tier: Literal["device", "host"] | None
) -> list[UserSummary]:
    """Users with something in the tier (None: in any), the most recently used first.

    Private states are left out. With an eviction policy whose order is not that of use, the order
    is the policy's, from its far end.
    """
    orders = [entry.device.order for entry in tiers.ledger if tier != "host"]
    orders += [entry.host.order for entry in tiers.ledger if tier != "device"]
    states = merge(*(order.recent() for order in orders), key=attrgetter("turn"), reverse=True)
    found = (state for state in _distinct(states) if _is_listed(state, tier))
    return [_summary(state) for state in islice(found, limit)]


def _distinct(states: Iterator[UserState]) -> Iterator[UserState]:
    """A state that is in both tiers comes once."""
    seen: set[UserState] = set()
    for state in states:
        if state not in seen:
            seen.add(state)
            yield state


def _is_listed(state: UserState, tier: Literal["device", "host"] | None) -> bool:
    if state.key.private_to:
        return False
    if tier is None:
        return True
    return (state.num_pages if tier == "device" else state.num_chunks) > 0


def _summary(state: UserState) -> UserSummary:
    return UserSummary(
        namespace=state.key.namespace,
        user_id=state.key.user_id,
        weights_version=state.key.weights_version,
        device_len=state.device_len,
        host_len=state.host_len,
        num_pages=state.num_pages,
        num_chunks=state.num_chunks,
        residency=state.residency,
        last_used_s=state.last_used_s,
    )


def pool_usage(tiers: Tiers, num_reservations: int) -> PoolUsage:
    """Pages, chunks, users and copies at this moment. O(weights versions + copies)."""
    versions = tuple(
        VersionUsage(
            version=entry.version,
            quota_pages=entry.device.quota,
            pages_used=entry.device.used,
            quota_chunks=entry.host.quota,
            chunks_used=entry.host.used,
            num_users=entry.num_states,
        )
        for entry in tiers.ledger
    )
    return PoolUsage(
        num_pages=tiers.pages.size,
        pages_used=tiers.pages.num_used,
        num_chunks=tiers.chunks.pool.size,
        chunks_used=tiers.chunks.pool.num_used,
        num_users=len(tiers.states),
        users_device=sum(len(entry.device.order) for entry in tiers.ledger),
        users_host=sum(len(entry.host.order) for entry in tiers.ledger),
        num_leaving=len(tiers.leaving),
        num_reservations=num_reservations,
        num_copies=len(tiers.copies),
        num_onloads=tiers.copies.num_onloads,
        by_version=versions,
    )
