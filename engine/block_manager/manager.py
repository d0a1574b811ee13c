"""Who holds which pages and chunks, and what of a history can be reused.

The life of a piece: `lookup` (optional, changes nothing), `reserve` (look-up, space and hold in
one act), the step runs, then `commit` (its rows count from now on) or `release` (they do not).
Copies are described here and moved elsewhere: the core submits the jobs that `reserve` and
`commit` hand out and reports their progress back through `copy_progress`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

import numpy as np

from engine.block_manager.eviction import load_policy
from engine.block_manager.fingerprint import NO_MATCH, HashChain, Match, match
from engine.block_manager.invariants import check
from engine.block_manager.layout import Layout
from engine.block_manager.reports import UserSummary, pool_usage, recent_users, view_of
from engine.block_manager.reservation import (
    NOTHING_FOUND,
    CopyOutcome,
    ForgetTicket,
    Lookup,
    PoolUsage,
    Reservation,
)
from engine.block_manager.space import Space
from engine.block_manager.state_copies import StateCopies
from engine.block_manager.tiers import Tiers
from engine.block_manager.user_state import Residency, UserKey, UserState, UserView
from engine.errors import InvariantError
from engine.metrics import Metrics
from engine.transfer.jobs import CopyEngine, CopyJob, CopyProgress
from engine.types import Int32Array


class BlockManager:
    """The one public face of user state. Owned by the loop thread; metadata only.

    At most one reservation a user is open at a time (pieces of one request follow each other).
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_chunks: int,
        pages_per_chunk: int,
        copies: CopyEngine,
        metrics: Metrics,
        page_bytes_all_layers: int,
        clock: Callable[[], float],
        eviction_policy: str = "lru",
        on_pages_freed: Callable[[Int32Array], None] | None = None,
    ) -> None:
        """`num_chunks` 0: no host tier, nothing is ever offloaded.

        page_bytes_all_layers: bytes of one page over all layers, for the byte counters. clock:
        monotonic seconds. on_pages_freed: told the pages that nobody holds any more (debug).
        Raises ConfigError for an unknown eviction policy.
        """
        self._layout = Layout(
            page_size=page_size, pages_per_chunk=pages_per_chunk, page_bytes=page_bytes_all_layers
        )
        self._tiers = Tiers(
            num_pages=num_pages,
            num_chunks=num_chunks,
            layout=self._layout,
            copies=copies,
            metrics=metrics,
            clock=clock,
            make_policy=load_policy(eviction_policy, {}),
            on_pages_freed=on_pages_freed,
        )
        self._metrics = metrics
        self._space = Space(self._tiers, metrics)
        self._state_copies = StateCopies(self._tiers, self._space, metrics, clock)
        self._reservations: dict[Reservation, None] = {}
        self._private_keys: set[UserKey] = set()

    @property
    def num_pages(self) -> int:
        """Pages of the device pool."""
        return self._tiers.pages.size

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._layout.page_size

    # Quotas.

    def set_quotas(self, shares: Mapping[str, float]) -> None:
        """Let weights versions share both pools: version -> share in (0, 1], together <= 1.

        Replaces the previous shares; takes nothing from anybody by itself. A version that is not
        named may keep nothing: all that it has is taken first. Empty: no quotas, one order over
        all users. Raises InvariantError and changes nothing when a share is out of range.
        """
        self._tiers.ledger.set_quotas(shares)

    def fits(self, tokens: int, version: str | None = None) -> bool:
        """A history of that many tokens can get its pages, once nothing is held.

        Measured against the version's quota; without quotas, or without a version, against the
        whole device pool.
        """
        quota = None if version is None else self._tiers.ledger.quota_of(version)
        limit = self._tiers.pages.size if quota is None else quota.pages
        return self._layout.pages_for(tokens) <= limit

    def is_above_quota(self, version: str) -> bool:
        """Whether the version uses more pages than its quota (without quotas: any at all)."""
        return self._tiers.ledger.of(version).device.excess > 0

    # Look-up and planning.

    def lookup(self, key: UserKey, chain: HashChain) -> Lookup:
        """What of the history is there. Changes nothing, promises nothing."""
        state = self._tiers.states.get(key)
        if state is None:
            return NOTHING_FOUND
        return _lookup(state, self._match(state, chain))

    def reserve(
        self, key: UserKey, chain: HashChain, *, stop: int, protected: Collection[UserKey]
    ) -> Reservation | None:
        """Plan a piece that ends with history row `stop`: look-up and hold in one act.

        A state that diverges from the chain is cut to the whole pages that match, at once and
        for good. Then pages for the onload and for the rows [matched, stop) are taken from the
        free ones and by eviction; `protected` are the users of the running and of the upcoming
        step. None: they cannot be had now; no page was taken and no recency changed.
        """
        if not 0 <= stop <= chain.length:
            raise InvariantError(f"piece ends at {stop} of a history of {chain.length}")
        state = self._tiers.states.get(key)
        found = NO_MATCH
        if state is not None:
            if state.residency is Residency.PINNED:
                raise InvariantError(f"user {key.user_id!r} has a piece in flight already")
            found = self._match(state, chain)
        if found.matched < chain.base_len:
            raise _missing_base(key, found, chain)
        if state is not None and found.diverges:
            self._diverge(state, found.matched)
            state = self._tiers.states.get(key)
        lookup = NOTHING_FOUND if state is None else _lookup(state, found)
        return self._hold(key, state, lookup, chain, stop, protected)

    def _hold(
        self,
        key: UserKey,
        state: UserState | None,
        lookup: Lookup,
        chain: HashChain,
        stop: int,
        protected: Collection[UserKey],
    ) -> Reservation | None:
        layout, accounts = self._layout, self._tiers.ledger.of(key.weights_version)
        start = min(lookup.matched, stop)
        reach = layout.pages_for(start)
        resident = 0 if state is None else state.num_pages
        onloaded = reach - resident if reach > resident else 0
        fresh = self._space.take_pages(
            onloaded + layout.pages_for(stop) - reach,
            accounts=accounts,
            own=state,
            keep=reach,
            protected=protected,
        )
        if fresh is None:
            return None
        state = self._tiers.states.get(key)  # its own last page may have been the one taken
        if state is None:
            state = UserState(key, accounts)
            if key.private_to:
                self._private_keys.add(key)
        held = state.pages[:reach]
        table = np.concatenate((held, fresh)) if len(fresh) else held.copy()
        return self._open(
            Reservation(
                key=key,
                chain=chain,
                lookup=lookup,
                start=start,
                stop=stop,
                block_table=table,
                num_shared=len(held),
                onload=None,
                is_private=lookup.is_prefix and stop > start,
                is_prefetch=False,
                state=state,
                resident_len=state.device_len,
            ),
            num_onloaded=onloaded,
        )

    def reserve_resident(self, key: UserKey, *, max_pages: int) -> Reservation | None:
        """Prefetch a known state: onload what only the host has, at most `max_pages` pages.

        Takes free pages only and never evicts. None: the user is unknown or has a piece in
        flight, or nothing is to be onloaded, or no page is free.
        """
        state = self._tiers.states.get(key)
        if state is None or state.residency is Residency.PINNED:
            return None
        layout = self._layout
        missing = layout.full_pages(state.host_len) - state.num_pages
        count = min(missing, max_pages, self._tiers.pages.num_free)
        if count <= 0:
            return None
        stop = layout.page_start(state.num_pages + count)
        device_hit = state.device_len
        fresh = self._tiers.pages.allocate(count, state.accounts.device)
        return self._open(
            Reservation(
                key=key,
                chain=None,
                lookup=Lookup(stop, device_hit, stop - device_hit, is_prefix=False),
                start=stop,
                stop=stop,
                block_table=np.concatenate((state.pages, fresh)),
                num_shared=state.num_pages,
                onload=None,
                is_private=False,
                is_prefetch=True,
                state=state,
                resident_len=state.device_len,
            ),
            num_onloaded=count,
        )

    def _open(self, reservation: Reservation, *, num_onloaded: int) -> Reservation:
        """Hold the state, and make the onload of the first `num_onloaded` pages of the piece."""
        self._tiers.pin(reservation.state)
        self._reservations[reservation] = None
        if num_onloaded:
            first = reservation.num_shared
            last = first + num_onloaded
            reservation.resident_len = self._layout.page_start(last)
            reservation.onload = self._state_copies.open_onload(
                reservation, first, reservation.block_table[first:last]
            )
        return reservation

    # The end of a piece.

    def commit(self, reservation: Reservation) -> CopyJob | None:
        """The step has run: its rows and its onloaded pages are valid from now on.

        Rows of a private piece, and of a user that was forgotten or refreshed meanwhile, are
        indexed nowhere. Returns the offload to submit at once, if there is one: all whole pages
        that are not yet on the host or on their way, as far as chunks can be had (else the rest
        is skipped, counted, and tried again at the user's next commit).
        """
        state = self._close(reservation)
        if reservation.outcome is CopyOutcome.FAILED:
            raise InvariantError(f"commit for {reservation.key.user_id!r} whose onload failed")
        offload = None
        if state.is_attached:
            self._adopt_onload(reservation)
            if not reservation.is_private:
                self._adopt_rows(reservation)
            if not reservation.is_prefetch:
                state.used_len = state.device_len
            if not state.key.private_to:
                offload = self._state_copies.open_offload(state)
        else:
            self._state_copies.waste(reservation)
        self._end(reservation)
        return offload

    def release(self, reservation: Reservation, *, onload_failed: bool) -> None:
        """The piece was dropped, or its step failed: its rows are indexed nowhere.

        onload_failed: the onload failed or came too late, so the host copy counts as lost from
        the job's first page on. Otherwise the onloaded pages stay if the onload is complete, and
        an onload that has not started is cancelled. A copy that still runs keeps its pages and
        chunks out of use until `copy_progress` reports its end.
        """
        state = self._close(reservation)
        if reservation.onload is not None:
            if onload_failed or reservation.outcome is CopyOutcome.FAILED:
                self._state_copies.fail_read(reservation)
            elif state.is_attached and reservation.outcome is CopyOutcome.DONE:
                self._adopt_onload(reservation)
            else:
                self._state_copies.waste(reservation)
        self._end(reservation)

    def _close(self, reservation: Reservation) -> UserState:
        if not reservation.is_open:
            raise InvariantError(f"a piece of {reservation.key.user_id!r} ended twice")
        reservation.is_open = False
        return reservation.state

    def _end(self, reservation: Reservation) -> None:
        """Release the piece's own pages and its hold on the state."""
        state, own = reservation.state, reservation.block_table[reservation.num_shared :]
        self._state_copies.let_go(reservation)
        self._tiers.pages.release(own, state.accounts.device)
        del self._reservations[reservation]
        self._tiers.unpin(state)

    def _adopt_onload(self, reservation: Reservation) -> None:
        """The onloaded pages become the state's."""
        state = reservation.state
        if reservation.resident_len > state.device_len:
            self._tiers.extend_device(reservation, reservation.resident_len)

    def _adopt_rows(self, reservation: Reservation) -> None:
        """Rows up to `stop` become the state's, and their fingerprints."""
        state, chain, stop = reservation.state, reservation.chain, reservation.stop
        if chain is None or stop <= state.length:
            return
        self._tiers.extend_device(reservation, stop)
        state.append_hashes(chain.between(state.num_hashes, self._layout.full_pages(stop)))
        state.tail_hash = chain.at(stop) if stop % self._layout.page_size else 0

    # Copies.

    def copy_progress(self, progress: CopyProgress) -> None:
        """What `CopyEngine.poll` reported about a job; a job that is not in flight is a bug."""
        self._state_copies.progress(progress)

    # The end of a state.

    def _diverge(self, state: UserState, matched: int) -> None:
        """Keep the whole pages below `matched`; what is under way for the rest is void."""
        state.branch += 1
        self._metrics.add("invalidations_total", 1, "diverged")
        self._tiers.withdraw_offloads(state)
        self._tiers.cut_device(state, self._layout.full_pages(matched))
        self._tiers.cut_host(state, matched)
        self._tiers.settle(state)

    def refresh(self, key: UserKey) -> None:
        """Invalidate what is known about the user under this key, in both tiers."""
        state = self._tiers.states.get(key)
        if state is not None:
            self._metrics.add("invalidations_total", 1, "refreshed")
            self._tiers.detach(state)

    def drop(self, key: UserKey) -> None:
        """Remove a state that nobody can ask for again; counted as nothing."""
        self._private_keys.discard(key)
        state = self._tiers.states.get(key)
        if state is not None:
            self._tiers.detach(state)

    def forget(self, user: tuple[str, str]) -> ForgetTicket:
        """Remove (namespace, user id) from both tiers: every weights version, every private state.

        The state is found no more at once. Bytes that a running step or copy still touches are
        freed when that ends; the ticket says when.
        """
        found = self._tiers.states_of(*user)
        found += [
            self._tiers.states[key]
            for key in self._private_keys
            if key[:2] == user and key in self._tiers.states
        ]
        leaving = [state for state in self._tiers.leaving if state.key[:2] == user]
        return self._remove(found, leaving, "forgotten")

    def drop_version(self, version: str, *, limit: int | None = None) -> ForgetTicket:
        """Remove every state of a weights version, like `forget`; private ones as well. O(users).

        limit: Remove at most that many; the ticket says how many it found (`num_found`). The
        version itself may be used again at any time.
        """
        accounts = self._tiers.ledger.of(version)
        found: dict[UserState, None] = {}
        for order in (accounts.device.order, accounts.host.order):
            for state in order.victims():
                if limit is not None and len(found) >= limit:
                    break
                found[state] = None
        leaving = [state for state in self._tiers.leaving if state.key.weights_version == version]
        return self._remove(list(found), leaving, "retired")

    def reset(self) -> ForgetTicket:
        """Remove every state of every user and weights version, like `forget`. O(users)."""
        return self._remove(list(self._tiers.states.values()), list(self._tiers.leaving), "reset")

    def _remove(
        self, found: list[UserState], leaving: Iterable[UserState], reason: str
    ) -> ForgetTicket:
        """Detach the found states. The ticket also waits for those that were leaving before."""
        ticket = ForgetTicket(
            device_tokens=sum(state.device_len for state in found),
            host_tokens=sum(state.host_len for state in found),
            num_found=len(found),
            states=(*found, *leaving),
        )
        self._tiers.detach_all(found)
        if found:
            self._metrics.add("invalidations_total", len(found), reason)
        self._tiers.ledger.close_unused()
        return ticket

    # Reports and checks.

    def user(self, key: UserKey) -> UserView | None:
        """What is known about a user; None when there is no state."""
        state = self._tiers.states.get(key)
        return None if state is None else view_of(self._tiers, state)

    def user_versions(self, namespace: str, user_id: str) -> list[UserView]:
        """What is known about a user under each weights version that knows it."""
        return [view_of(self._tiers, state) for state in self._tiers.states_of(namespace, user_id)]

    def users(
        self, limit: int, *, tier: Literal["device", "host"] | None = None
    ) -> list[UserSummary]:
        """At most `limit` users with something in the tier (None: in any), latest used first.

        Private states are not listed. O(limit) with the built-in eviction policy.
        """
        return recent_users(self._tiers, limit, tier)

    def usage(self) -> PoolUsage:
        """Pages, chunks, users and copies at this moment."""
        return pool_usage(self._tiers, len(self._reservations))

    def copies(self) -> list[CopyJob]:
        """The jobs in flight: made, and not known to have ended."""
        return [job for job, _ in self._tiers.copies.records()]

    def check_invariants(self, *, idle: bool) -> None:
        """Recount everything; raises InvariantError with what is wrong.

        idle: also, no piece, no copy and no detached state is left. O(users + pages).
        """
        check(self._tiers, list(self._reservations), idle=idle)

    def _match(self, state: UserState, chain: HashChain) -> Match:
        if chain.page_size != self._layout.page_size:
            raise InvariantError(
                f"fingerprints for pages of {chain.page_size}, pages have {self._layout.page_size}"
            )
        return match(state.hashes, state.length, state.tail_hash, chain)


def _missing_base(key: UserKey, found: Match, chain: HashChain) -> InvariantError:
    """A piece may not begin among rows that a delta request does not send."""
    return InvariantError(
        f"{found.matched} tokens of user {key.user_id!r} match, the piece needs its base of "
        f"{chain.base_len}"
    )


def _lookup(state: UserState, found: Match) -> Lookup:
    device_hit = min(found.matched, state.device_len)  # the rest is at most host_len
    return Lookup(found.matched, device_hit, found.matched - device_hit, found.is_prefix)
