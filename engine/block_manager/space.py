"""Whose pages and chunks are taken when there are not enough: the replacement policy.

Without quotas: users from the least recently used on, each from its tail. With quotas the order is

1. users of weights versions above their quota, the least recently used first, from each version
   down to its quota at most;
2. users of the asking version, the least recently used first;
3. for pages, the unread tail of the asking user itself.

A version at or below its quota loses nothing to another one. Hence, when the quotas fit into the
pool and nothing is held, a piece that fits into its version's quota always gets its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import merge
from operator import attrgetter

from engine.block_manager.accounts import Account, VersionAccounts
from engine.block_manager.page_pool import NO_IDS
from engine.block_manager.tiers import Tiers
from engine.block_manager.user_state import Residency, UserKey, UserState
from engine.metrics import Metrics
from engine.types import Int32Array

_num_pages: Callable[[UserState], int] = attrgetter("num_pages")
_num_chunks: Callable[[UserState], int] = attrgetter("num_chunks")


class _Victims:
    """Who gives up how much, until `shortage` is met. Changes no state.

    Attributes:
        counts: State -> pages or chunks to take from its tail, in the order of taking.
        shortage: What is still to be found.
    """

    __slots__ = ("_held", "counts", "shortage")

    def __init__(self, shortage: int, held: Callable[[UserState], int]) -> None:
        self.counts: dict[UserState, int] = {}
        self.shortage = shortage
        self._held = held

    def add(
        self,
        accounts: Sequence[Account],
        asker: Account,
        is_takeable: Callable[[UserState], bool],
    ) -> None:
        """Go through the users of versions above their quota, then of the asking version.

        Costs the users that are looked at: a version that is at its quota is not walked through.
        """
        above = [account for account in accounts if account.excess > 0]
        if len(above) == 1:
            self._take_from(above[0].order.victims(), above[0].excess, is_takeable)
        elif above:
            self._take_from_all(above, is_takeable)
        if self.shortage > 0 and asker.quota:  # else all that it has was above its quota
            self._take_from(asker.order.victims(), asker.used, is_takeable)

    def _take_from(
        self,
        states: Iterator[UserState],
        at_most: int,
        is_takeable: Callable[[UserState], bool],
    ) -> None:
        for state in states:
            if is_takeable(state):
                left = self._held(state) - self.counts.get(state, 0)
                at_most -= self.take(state, min(left, at_most))
                if self.shortage == 0 or at_most == 0:
                    return

    def _take_from_all(
        self, above: Sequence[Account], is_takeable: Callable[[UserState], bool]
    ) -> None:
        """The users of several accounts, merged by when they were used, each down to its quota."""
        excess = {account: account.excess for account in above}
        for _, state, account in merge(*(_walk(account, excess) for account in above)):
            if is_takeable(state):
                excess[account] -= self.take(state, min(self._held(state), excess[account]))
                if self.shortage == 0:
                    return

    def take(self, state: UserState, at_most: int) -> int:
        """Take that many, or as many as are still needed; how many that are."""
        count = min(self.shortage, at_most)
        if count > 0:
            self.counts[state] = self.counts.get(state, 0) + count
            self.shortage -= count
        return count


def _walk(account: Account, excess: dict[Account, int]) -> Iterator[tuple[int, UserState, Account]]:
    """An account's users with their turns, until the account has no excess any more."""
    for state in account.order.victims():
        if excess[account] <= 0:
            return
        yield state.turn, state, account


class Space:
    """Finds pages and chunks, by eviction if need be. Owned by the block manager (loop thread)."""

    __slots__ = ("_copies", "_metrics", "_tiers")

    def __init__(self, tiers: Tiers, metrics: Metrics) -> None:
        self._tiers = tiers
        self._copies = tiers.copies
        self._metrics = metrics

    # Device.

    def take_pages(
        self,
        count: int,
        *,
        accounts: VersionAccounts,
        own: UserState | None,
        keep: int,
        protected: Collection[UserKey],
    ) -> Int32Array | None:
        """`count` pages for a piece of `own`, from the free ones, then by eviction.

        All or nothing: None when they cannot be had. `keep`: pages of `own` that the piece reads;
        its pages beyond are taken only when nobody else has enough (a piece that is shorter than
        its own user's state would otherwise wait for itself). own: None for a new user, whose
        version's accounts these are.
        """
        if count == 0:
            return NO_IDS
        pages = self._tiers.pages
        shortage = count - pages.num_free
        if shortage > 0 and not self._evict(
            shortage, accounts.device, own, keep, frozenset(protected)
        ):
            return None
        return pages.allocate(count, accounts.device)

    def _evict(
        self,
        shortage: int,
        asker: Account,
        own: UserState | None,
        keep: int,
        protected: Collection[UserKey],
    ) -> bool:
        """Free exactly `shortage` pages from tails in eviction order, or change nothing."""
        refused: set[UserState] = set()
        while True:
            victims = self._page_victims(shortage, asker, own, keep, protected, refused)
            if victims.shortage > 0:
                return False
            blocked = self._first_blocked(victims)
            if blocked is None:
                break
            refused.add(blocked)
        for state, num_pages in victims.counts.items():
            self._evict_pages(state, num_pages)
        return True

    def _page_victims(
        self,
        shortage: int,
        asker: Account,
        own: UserState | None,
        keep: int,
        protected: Collection[UserKey],
        refused: Collection[UserState],
    ) -> _Victims:
        """A user whose only copies are offloads counts as takeable until its cancel is refused."""
        copies = self._copies

        def is_takeable(state: UserState) -> bool:
            return (
                state is not own
                and state.residency is Residency.RESIDENT
                and state not in refused
                and state.key not in protected
                and copies.has_only_offloads(state)
            )

        victims = _Victims(shortage, _num_pages)
        victims.add([entry.device for entry in self._tiers.ledger], asker, is_takeable)
        if own is not None and own not in refused and copies.has_only_offloads(own):
            victims.take(own, own.num_pages - keep)
        return victims

    def _first_blocked(self, victims: _Victims) -> UserState | None:
        """Cancel the victims' queued offloads; the first user whose copy has started."""
        for state in victims.counts:
            if self._copies.is_copying(state):
                is_clear = self._tiers.withdraw_offloads(state)
                self._tiers.settle(state)
                if not is_clear:
                    return state
        return None

    def _evict_pages(self, state: UserState, count: int) -> None:
        before = state.device_len
        self._tiers.cut_device(state, state.num_pages - count)
        dropped = before - max(state.device_len, state.host_len)
        self._metrics.add("evicted_pages_total", count, "device", "space")
        self._metrics.add("dropped_tokens_total", max(0, dropped))
        self._tiers.settle(state)

    # Host.

    def take_chunks(self, count: int, *, own: UserState) -> Int32Array:
        """Up to `count` chunks to extend `own`: free ones, then tails of other users."""
        pool = self._tiers.chunks.pool
        shortage = count - pool.num_free
        if shortage > 0:
            self._evict_chunks(shortage, own)
        return pool.allocate(min(count, pool.num_free), own.accounts.host)

    def _evict_chunks(self, shortage: int, own: UserState) -> None:
        tiers, copies = self._tiers, self._copies

        def is_takeable(state: UserState) -> bool:
            return (
                state is not own
                and state.residency is Residency.RESIDENT
                and not copies.is_copying(state)
            )

        victims = _Victims(shortage, _num_chunks)
        victims.add([entry.host for entry in tiers.ledger], own.accounts.host, is_takeable)
        for state, count in victims.counts.items():
            before = state.host_len
            tiers.cut_host(state, (state.num_chunks - count) * tiers.layout.chunk_tokens)
            pages = tiers.layout.full_pages(before - state.host_len)
            self._metrics.add("evicted_pages_total", pages, "host", "space")
            tiers.settle(state)
