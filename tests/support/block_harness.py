"""A block manager on copies that move when the test says so."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from engine.block_manager.fingerprint import HashChain
from engine.block_manager.manager import BlockManager
from engine.block_manager.reservation import Lookup, Reservation
from engine.block_manager.user_state import UserKey, UserView
from engine.metrics import Metrics
from engine.testing.fakes import FakeClock, ManualCopyEngine
from engine.transfer.jobs import CopyJob

PAGE_BYTES = 1000


def key_of(user: str, version: str = "v1", namespace: str = "") -> UserKey:
    """A user is "a", under weights version v1, or "a@v2"."""
    name, _, named_version = user.partition("@")
    return UserKey(namespace, name, named_version or version)


class Blocks:
    """A manager with pages of 4 tokens and chunks of 2 pages, and what a core would do with it.

    A history is a number of tokens (token i is i), or the tokens themselves.
    """

    page_size = 4

    def __init__(
        self, num_pages: int = 16, num_chunks: int = 16, eviction_policy: str = "lru"
    ) -> None:
        self.clock = FakeClock()
        self.copies = ManualCopyEngine(is_automatic=False, clock=self.clock)
        self.metrics = Metrics()
        self.manager = BlockManager(
            num_pages=num_pages,
            page_size=self.page_size,
            num_chunks=num_chunks,
            pages_per_chunk=2,
            copies=self.copies,
            metrics=self.metrics,
            page_bytes_all_layers=PAGE_BYTES,
            clock=self.clock,
            eviction_policy=eviction_policy,
        )

    def chain(self, history: int | list[int]) -> HashChain:
        tokens = list(range(history)) if isinstance(history, int) else history
        records = np.array(tokens, dtype=np.int64).reshape(len(tokens), 1)
        return HashChain.from_records(records, b"", self.page_size)

    def lookup(self, user: str, history: int | list[int]) -> Lookup:
        return self.manager.lookup(key_of(user), self.chain(history))

    def plan(
        self,
        user: str,
        history: int | list[int],
        *,
        stop: int | None = None,
        protected: Collection[str] = (),
    ) -> Reservation | None:
        """Reserve, and submit the onload as the core does."""
        chain = self.chain(history)
        reservation = self.manager.reserve(
            key_of(user),
            chain,
            stop=chain.length if stop is None else stop,
            protected={key_of(name) for name in protected},
        )
        if reservation is not None and reservation.onload is not None:
            self.copies.submit(reservation.onload)
        return reservation

    def must_plan(
        self, user: str, history: int | list[int], *, stop: int | None = None
    ) -> Reservation:
        reservation = self.plan(user, history, stop=stop)
        assert reservation is not None
        return reservation

    def commit(self, reservation: Reservation) -> CopyJob | None:
        job = self.manager.commit(reservation)
        if job is not None:
            self.copies.submit(job)
        return job

    def serve(self, user: str, history: int | list[int]) -> Reservation:
        """A whole request; its copies stay in flight."""
        reservation = self.must_plan(user, history)
        self.commit(reservation)
        return reservation

    def report(self) -> None:
        for progress in self.copies.poll():
            self.manager.copy_progress(progress)

    def drain(self) -> None:
        """Let all copies end, in order."""
        for job in [*self.copies.started, *self.copies.queued]:
            self.copies.finish(job)
        self.report()

    def user(self, user: str) -> UserView:
        view = self.manager.user(key_of(user))
        assert view is not None
        return view

    def lengths(self, *users: str) -> list[tuple[int, int]]:
        """(device_len, host_len) of users; (0, 0) for one without state."""
        views = [self.manager.user(key_of(user)) for user in users]
        return [(view.device_len, view.host_len) if view else (0, 0) for view in views]

    def used(self) -> dict[str, tuple[int, int, int]]:
        """By weights version: pages, chunks and users that can be found."""
        return {
            entry.version: (entry.pages_used, entry.chunks_used, entry.num_users)
            for entry in self.manager.usage().by_version
        }

    def quotas(self) -> dict[str, tuple[int | None, int | None]]:
        """By weights version: its quota of pages and of chunks."""
        return {
            entry.version: (entry.quota_pages, entry.quota_chunks)
            for entry in self.manager.usage().by_version
        }

    def evict_device(self) -> None:
        """Take the whole device for one request, then forget it."""
        pages = self.manager.usage().num_pages
        reservation = self.must_plan("everything", [-1] * pages * self.page_size)
        self.manager.release(reservation, onload_failed=False)

    def value(self, metric: str, *labels: str) -> float:
        return self.metrics.value(metric, *labels)

    def check(self, *, idle: bool = True) -> None:
        self.manager.check_invariants(idle=idle)
