"""What the block manager hands out: look-ups, reservations, forget tickets, usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from engine.block_manager.fingerprint import HashChain
from engine.block_manager.user_state import Residency, UserKey, UserState
from engine.transfer.jobs import CopyJob
from engine.types import Int32Array


class Lookup(NamedTuple):
    """What of a request's history is there, in tokens.

    matched == device_hit + host_hit. is_prefix: the request is shorter than the state and all of
    its own whole pages match.
    """

    matched: int
    device_hit: int
    host_hit: int
    is_prefix: bool


NOTHING_FOUND = Lookup(matched=0, device_hit=0, host_hit=0, is_prefix=False)


class CopyOutcome(Enum):
    """What is known about a reservation's onload."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True, eq=False, kw_only=True)
class Reservation:
    """One piece's hold on pages, from planning until commit or release (exactly one of them).

    Owned by the block manager; the core reads it.

    Attributes:
        chain: The request's fingerprints; None for a prefetch of a known state.
        lookup: What was there when the piece was planned.
        start, stop: History rows [start, stop) are to be computed; start == stop for none.
        block_table: int32 [pages of stop tokens]: resident, onloaded and new pages, in order.
        num_shared: The first pages of the table, which are the state's and stay while it is
            pinned. The others are the piece's own, until its commit makes them the state's.
        onload: The transfer into this table's pages; the core submits it at once, or else
            releases the reservation without ever submitting it. None when all is there.
        is_private: The rows go to private pages and are never indexed.
        is_prefetch: Nobody has asked for these tokens yet.
        state: The state it holds.
        resident_len: `device_len` once the onload is complete.
        outcome: What the copy engine has reported about the onload.
        is_open: Neither committed nor released yet.
    """

    key: UserKey
    chain: HashChain | None
    lookup: Lookup
    start: int
    stop: int
    block_table: Int32Array
    num_shared: int
    onload: CopyJob | None
    is_private: bool
    is_prefetch: bool
    state: UserState
    resident_len: int
    outcome: CopyOutcome = CopyOutcome.PENDING
    is_open: bool = True


@dataclass(slots=True, eq=False, frozen=True)
class ForgetTicket:
    """What a forget or another removal took, in tokens per tier, and whether it is complete.

    num_found: states that could be found; `states` has those that were leaving before as well.
    """

    num_found: int
    device_tokens: int
    host_tokens: int
    states: Sequence[UserState]

    def is_done(self) -> bool:
        """No step and no copy can touch the bytes any more."""
        return all(state.residency is Residency.ABSENT for state in self.states)


class VersionUsage(NamedTuple):
    """What one weights version uses and may use.

    quota_pages, quota_chunks: None without quotas. pages_used, chunks_used: whatever holds them,
    also pieces, copies and detached states. num_users: states that can be found.
    """

    version: str
    quota_pages: int | None
    pages_used: int
    quota_chunks: int | None
    chunks_used: int
    num_users: int


class PoolUsage(NamedTuple):
    """Pages, chunks and users at this moment.

    num_users: states that can be found. users_device, users_host: of them, those with something
    in the tier, or with a piece in flight. num_leaving: detached states that a step or a copy
    still touches. num_copies: jobs in flight. num_onloads: of them, onloads. by_version: adds up
    to pages_used, chunks_used and num_users.
    """

    num_pages: int
    pages_used: int
    num_chunks: int
    chunks_used: int
    num_users: int
    users_device: int
    users_host: int
    num_leaving: int
    num_reservations: int
    num_copies: int
    num_onloads: int
    by_version: tuple[VersionUsage, ...]

    @property
    def pages_free(self) -> int:
        return self.num_pages - self.pages_used

    @property
    def chunks_free(self) -> int:
        return self.num_chunks - self.chunks_used
