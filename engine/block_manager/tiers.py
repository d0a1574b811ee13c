"""The user states and the space they hold in both tiers.

Everything that shortens a state is here: cuts (for space, after a divergence, after a failed read)
and detaching. Whose state is cut for space is decided in `space.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from engine.block_manager.accounts import Ledger, VersionAccounts
from engine.block_manager.chunk_store import ChunkStore
from engine.block_manager.copies_in_flight import CopiesInFlight
from engine.block_manager.eviction import EvictionPolicy
from engine.block_manager.layout import Layout
from engine.block_manager.page_pool import RefPool
from engine.block_manager.reservation import Reservation
from engine.block_manager.user_state import Event, Residency, UserKey, UserState
from engine.metrics import Metrics
from engine.transfer.jobs import CopyEngine
from engine.types import Int32Array


class Tiers:
    """Owned by the block manager (loop thread).

    A state is in its version's order of a tier while it holds something in that tier, and while it
    is pinned: so the order is the order of planning, whenever the rows arrive.

    Attributes:
        ledger: The weights versions' use of the pools, their quotas and their orders of users.
        states: The states that can be found.
        leaving: Detached states that a step or a copy still touches.
    """

    __slots__ = (
        "_clock", "_metrics", "_turn", "chunks", "copies", "layout", "leaving", "ledger",
        "pages", "states",
    )  # fmt: skip

    def __init__(
        self,
        *,
        num_pages: int,
        num_chunks: int,
        layout: Layout,
        copies: CopyEngine,
        metrics: Metrics,
        clock: Callable[[], float],
        make_policy: Callable[[], EvictionPolicy[Any]],
        on_pages_freed: Callable[[Int32Array], None] | None,
    ) -> None:
        self.layout = layout
        self.pages = RefPool(num_pages, "page", on_pages_freed)
        self.chunks = ChunkStore(num_chunks, layout)
        self.copies = CopiesInFlight(self.pages, self.chunks.pool, copies)
        self.ledger = Ledger(num_pages=num_pages, num_chunks=num_chunks, make_policy=make_policy)
        self.states: dict[UserKey, UserState] = {}
        self.leaving: dict[UserState, None] = {}
        self._metrics = metrics
        self._clock = clock
        self._turn = 0

    def states_of(self, namespace: str, user_id: str) -> list[UserState]:
        """The user's states that can be found, private ones excepted. O(weights versions)."""
        keys = [UserKey(namespace, user_id, entry.version) for entry in self.ledger]
        return [self.states[key] for key in keys if key in self.states]

    # Life of a state.

    def pin(self, state: UserState) -> None:
        """A piece was planned: touch both orders and hold the state."""
        accounts = state.accounts
        if state.residency is Residency.ABSENT:
            self.states[state.key] = state
            accounts.num_states += 1
        state.fire(Event.PIN)
        self._turn += 1
        state.turn = self._turn
        state.last_used_s = self._clock()
        accounts.device.order.touch(state)
        accounts.host.order.touch(state)

    def unpin(self, state: UserState) -> None:
        """The piece has ended."""
        if state.residency is Residency.DETACHED:
            self.pages.release(state.drop_pages(), state.accounts.device)
        state.fire(Event.UNPIN)
        self.settle(state)

    def settle(self, state: UserState) -> None:
        """Bring orders and index into line with what the state still holds."""
        if state.residency is Residency.RESIDENT:
            if state.num_pages == 0 and state.num_chunks == 0:
                self.detach(state)
                return
            if state.num_pages == 0:
                state.accounts.device.order.remove(state)
            if state.num_chunks == 0:
                state.accounts.host.order.remove(state)
        elif state.residency is Residency.LEAVING and not self.copies.is_copying(state):
            state.fire(Event.DRAIN)
            del self.leaving[state]
            state.accounts.num_leaving -= 1

    def detach(self, state: UserState) -> None:
        """Nobody finds the state any more; what it held is released, pages of a piece excepted.

        Its `device_len` and `host_len` become 0. A pinned state keeps its pages until its piece
        ends. Offloads that have not started are cancelled.
        """
        self.detach_all((state,))

    def detach_all(self, states: Collection[UserState]) -> None:
        """Detach many states; what they held is released at once, a version at a time."""
        pages: dict[VersionAccounts, list[Int32Array]] = {}
        chunks: dict[VersionAccounts, list[Int32Array]] = {}
        num_unused = 0
        for state in states:
            self._hide(state)
            self.withdraw_offloads(state)
            num_unused += state.num_pages - self.layout.pages_for(state.used_len)
            chunks.setdefault(state.accounts, []).append(state.empty())
            if state.residency is Residency.LEAVING:
                pages.setdefault(state.accounts, []).append(state.drop_pages())
        for accounts, released in pages.items():
            self.pages.release(np.concatenate(released), accounts.device)
        for accounts, released in chunks.items():
            self.chunks.pool.release(np.concatenate(released), accounts.host)
        if num_unused:
            self._metrics.add("prefetch_wasted_bytes_total", self.layout.bytes_of(num_unused))
        for state in states:
            self.settle(state)

    def _hide(self, state: UserState) -> None:
        """From the index to the leaving ones."""
        state.fire(Event.DETACH)
        del self.states[state.key]
        self.leaving[state] = None
        accounts = state.accounts
        accounts.num_states -= 1
        accounts.num_leaving += 1
        accounts.device.order.remove(state)
        accounts.host.order.remove(state)

    # Growth and cuts.

    def extend_device(self, reservation: Reservation, tokens: int) -> None:
        """The device prefix grows to `tokens`: the piece's pages up to there become the state's."""
        state, last = reservation.state, self.layout.pages_for(tokens)
        state.append_pages(reservation.block_table[state.num_pages : last])
        state.device_len = tokens
        reservation.num_shared = last

    def cut_device(self, state: UserState, num_pages: int) -> None:
        """Keep the first `num_pages` device pages."""
        if num_pages >= state.num_pages:
            return
        state.device_len = self.layout.page_start(num_pages)
        unused = state.num_pages - max(num_pages, self.layout.pages_for(state.used_len))
        if unused > 0:
            self._metrics.add("prefetch_wasted_bytes_total", self.layout.bytes_of(unused))
        state.used_len = min(state.used_len, state.device_len)
        self.pages.release(state.cut_pages(num_pages), state.accounts.device)
        state.cut_hashes(self.layout.full_pages(state.length))

    def cut_host(self, state: UserState, tokens: int) -> None:
        """Let host_len fall to `tokens` (a page boundary); what was offered beyond is void."""
        state.host_len = min(state.host_len, tokens)
        state.offload_len = state.host_len
        self._cut_chunks(state)
        state.cut_hashes(self.layout.full_pages(state.length))

    def retract_offload(self, state: UserState, tokens: int) -> None:
        """Tokens from `tokens` on are not on their way to the host any more: offer them again."""
        state.offload_len = max(state.host_len, min(state.offload_len, tokens))
        self._cut_chunks(state)

    def _cut_chunks(self, state: UserState) -> None:
        needed = self.layout.chunks_for(state.offload_len)
        if needed < state.num_chunks:
            self.chunks.pool.release(state.cut_chunks(needed), state.accounts.host)

    def withdraw_offloads(self, state: UserState) -> bool:
        """Cancel the state's offloads that have not started. True: no copy of it is left."""
        for job in self.copies.cancel_offloads(state):
            if job.branch == state.branch:
                self.retract_offload(state, self.layout.page_start(job.first_page))
        return not self.copies.is_copying(state)
