"""The user states, the space they hold in both tiers, and how space is taken back.

Everything that shortens a state is here: eviction of device pages and of host chunks (exactly as
the replacement policy says), cuts after a divergence or a failed read, and detaching.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from engine.block_manager.chunk_store import ChunkStore
from engine.block_manager.copies_in_flight import CopiesInFlight
from engine.block_manager.eviction import EvictionPolicy
from engine.block_manager.layout import Layout
from engine.block_manager.page_pool import RefPool
from engine.block_manager.user_state import Event, Residency, UserKey, UserState
from engine.metrics import Metrics
from engine.transfer.jobs import CopyEngine
from engine.types import Int32Array


class Tiers:
    """Owned by the block manager (loop thread).

    A state is in a tier's order while it holds something in that tier, and while it is pinned:
    so the order is the order of planning, whenever the rows arrive.

    Attributes:
        states: The states that can be found.
        leaving: Detached states that a step or a copy still touches.
    """

    __slots__ = (
        "_metrics", "chunks", "copies", "device_order", "host_order", "layout", "leaving",
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
        make_policy: Callable[[], EvictionPolicy[Any]],
        on_pages_freed: Callable[[Int32Array], None] | None,
    ) -> None:
        self.layout = layout
        self.pages = RefPool(num_pages, "page", on_pages_freed)
        self.chunks = ChunkStore(num_chunks, layout)
        self.copies = CopiesInFlight(self.pages, self.chunks.pool, copies)
        self.device_order: EvictionPolicy[UserState] = make_policy()
        self.host_order: EvictionPolicy[UserState] = make_policy()
        self.states: dict[UserKey, UserState] = {}
        self.leaving: dict[UserState, None] = {}
        self._metrics = metrics

    # Life of a state.

    def pin(self, state: UserState) -> None:
        """A piece was planned: touch both orders and hold the state."""
        state.fire(Event.PIN)
        self.states[state.key] = state
        self.device_order.touch(state)
        self.host_order.touch(state)

    def unpin(self, state: UserState) -> None:
        """The piece has ended."""
        state.fire(Event.UNPIN)
        self.settle(state)

    def settle(self, state: UserState) -> None:
        """Bring orders and index into line with what the state still holds."""
        if state.residency is Residency.RESIDENT:
            if state.num_pages == 0 and state.num_chunks == 0:
                self.detach(state)
                return
            if state.num_pages == 0:
                self.device_order.remove(state)
            if state.num_chunks == 0:
                self.host_order.remove(state)
        elif state.residency is Residency.LEAVING and not self.copies.is_copying(state):
            state.fire(Event.DRAIN)
            del self.leaving[state]

    def detach(self, state: UserState) -> None:
        """Nobody finds the state any more; its own references are dropped in both tiers.

        Its `device_len` and `host_len` become 0. Offloads that have not started are cancelled.
        """
        state.fire(Event.DETACH)
        del self.states[state.key]
        self.leaving[state] = None
        self.device_order.remove(state)
        self.host_order.remove(state)
        self.withdraw_offloads(state)
        self.cut_device(state, 0)
        self.cut_host(state, 0)
        self.settle(state)

    # Cuts.

    def cut_device(self, state: UserState, num_pages: int) -> None:
        """Keep the first `num_pages` device pages."""
        if num_pages >= state.num_pages:
            return
        state.device_len = self.layout.page_start(num_pages)
        unused = state.num_pages - max(num_pages, self.layout.pages_for(state.used_len))
        if unused > 0:
            self._metrics.add("prefetch_wasted_bytes_total", self.layout.bytes_of(unused))
        state.used_len = min(state.used_len, state.device_len)
        self.pages.release(state.cut_pages(num_pages))
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
            self.chunks.pool.release(state.cut_chunks(needed))

    def withdraw_offloads(self, state: UserState) -> bool:
        """Cancel the state's offloads that have not started. True: no copy of it is left."""
        for job in self.copies.cancel_offloads(state):
            if job.branch == state.branch:
                self.retract_offload(state, self.layout.page_start(job.first_page))
        return not self.copies.is_copying(state)

    # Device space.

    def take_pages(
        self, count: int, *, own: UserState | None, keep: int, protected: Collection[UserKey]
    ) -> Int32Array | None:
        """`count` pages for a piece of `own`, from the free ones, then by eviction.

        All or nothing: None when they cannot be had. `keep`: pages of `own` that the piece reads;
        its pages beyond are taken only when nobody else has enough (a piece that is shorter than
        its own user's state would otherwise wait for itself).
        """
        shortage = count - self.pages.num_free
        if shortage > 0 and not self._evict(shortage, own, keep, frozenset(protected)):
            return None
        return self.pages.allocate(count)

    def _evict(
        self, shortage: int, own: UserState | None, keep: int, protected: Collection[UserKey]
    ) -> bool:
        """Free exactly `shortage` pages from tails in eviction order, or change nothing."""
        refused: set[UserState] = set()
        while True:
            plan = self._plan_eviction(shortage, own, keep, protected, refused)
            if plan is None:
                return False
            blocked = self._first_blocked(plan)
            if blocked is None:
                break
            refused.add(blocked)
        for state, num_pages in plan:
            self._evict_pages(state, num_pages)
        return True

    def _plan_eviction(
        self,
        shortage: int,
        own: UserState | None,
        keep: int,
        protected: Collection[UserKey],
        refused: Collection[UserState],
    ) -> list[tuple[UserState, int]] | None:
        """(user, pages to take from its tail), together `shortage`; None when there are fewer.

        A user whose only copies are offloads is counted as takeable until its cancel is refused.
        """
        plan = []
        for state in self.device_order.victims():
            if shortage <= 0:
                break
            if state is own or state.residency is not Residency.RESIDENT or state in refused:
                continue
            if state.key in protected or not self.copies.has_only_offloads(state):
                continue
            plan.append((state, min(shortage, state.num_pages)))
            shortage -= state.num_pages
        if (
            shortage > 0
            and own is not None
            and own not in refused
            and self.copies.has_only_offloads(own)
        ):
            extra = min(shortage, own.num_pages - keep)
            if extra > 0:
                plan.append((own, extra))
                shortage -= extra
        return plan if shortage <= 0 else None

    def _first_blocked(self, plan: list[tuple[UserState, int]]) -> UserState | None:
        """Cancel the queued offloads of a plan's users; the first user whose copy has started."""
        for state, _ in plan:
            if self.copies.is_copying(state):
                is_clear = self.withdraw_offloads(state)
                self.settle(state)
                if not is_clear:
                    return state
        return None

    def _evict_pages(self, state: UserState, count: int) -> None:
        before = state.device_len
        self.cut_device(state, state.num_pages - count)
        dropped = before - max(state.device_len, state.host_len)
        self._metrics.add("evicted_pages_total", count, "device", "space")
        self._metrics.add("dropped_tokens_total", max(0, dropped))
        self.settle(state)

    # Host space.

    def take_chunks(self, count: int, *, own: UserState) -> Int32Array:
        """Up to `count` chunks to extend `own`: free ones, then tails of other users."""
        shortage = count - self.chunks.pool.num_free
        if shortage > 0:
            self._evict_chunks(shortage, own)
        return self.chunks.pool.allocate(min(count, self.chunks.pool.num_free))

    def _evict_chunks(self, shortage: int, own: UserState) -> None:
        plan = []
        for state in self.host_order.victims():
            if shortage <= 0:
                break
            if state is own or state.residency is not Residency.RESIDENT:
                continue
            if state.num_chunks and not self.copies.is_copying(state):
                plan.append((state, min(shortage, state.num_chunks)))
                shortage -= state.num_chunks
        for state, count in plan:
            before = state.host_len
            self.cut_host(state, (state.num_chunks - count) * self.layout.chunk_tokens)
            pages = self.layout.full_pages(before - state.host_len)
            self._metrics.add("evicted_pages_total", pages, "host", "space")
            self.settle(state)
