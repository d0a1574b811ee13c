"""Who must give up space to whom, said once more and one page at a time, for the property tests.

The shadow knows the order of planning and the shares that were set. What is held it reads off the
block tables, the states' pages and the jobs; never off the accounts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import floor
from typing import NamedTuple

from engine.block_manager.reservation import Reservation
from engine.block_manager.user_state import UserKey, UserState
from engine.transfer.jobs import CopyJob, Direction


class Held(NamedTuple):
    """What a state that can be found holds."""

    state: UserState
    pages: tuple[int, ...]
    chunks: tuple[int, ...]
    offload_len: int


class World(NamedTuple):
    """All that holds pages and chunks at a moment.

    open: pieces in flight. jobs: copies that may touch bytes. queued: of them, those that can
    still be cancelled.
    """

    states: dict[UserKey, Held]
    open: list[Reservation]
    jobs: list[CopyJob]
    queued: list[CopyJob]

    def jobs_of(self, key: UserKey) -> list[CopyJob]:
        return [job for job in self.jobs if job.owner is self.states[key].state]

    def diverged(self, key: UserKey, num_pages: int) -> World:
        """The user keeps that many pages; its offloads that have not started are withdrawn."""
        if key not in self.states:
            return self
        gone = [
            job
            for job in self.jobs_of(key)
            if job.direction is Direction.OFFLOAD and job in self.queued
        ]
        held = self.states[key]
        return self._replace(
            states={**self.states, key: held._replace(pages=held.pages[:num_pages])},
            jobs=[job for job in self.jobs if job not in gone],
        )


def world_of(
    states: Mapping[UserKey, UserState],
    open_: Iterable[Reservation],
    jobs: Iterable[CopyJob],
    queued: Iterable[CopyJob],
) -> World:
    held = {
        key: Held(
            state, tuple(state.pages.tolist()), tuple(state.chunks.tolist()), state.offload_len
        )
        for key, state in states.items()
    }
    return World(held, list(open_), list(jobs), list(queued))


class Wanted(NamedTuple):
    """A piece to be planned: its user, the pages it reads, and all the pages it needs."""

    key: UserKey
    kept: int
    needed: int


class QuotaShadow:
    """The order of planning, the quotas, and what follows from them."""

    def __init__(
        self, num_pages: int, num_chunks: int, page_size: int, pages_per_chunk: int
    ) -> None:
        self.num_pages = num_pages
        self.num_chunks = num_chunks
        self.page_size = page_size
        self.pages_per_chunk = pages_per_chunk
        self.order: list[UserKey] = []
        self.shares: dict[str, float] = {}

    def planned(self, key: UserKey) -> None:
        """A piece of the user was planned: the latest one."""
        self.order = [*(other for other in self.order if other != key), key]

    def page_quota(self, version: str) -> int | None:
        """None: there are no quotas."""
        quotas = {name: self._quota(name, self.num_pages, 1) for name in [*self.shares, version]}
        while sum(quotas.values()) > self.num_pages and max(quotas.values()) > 1:
            largest = max(quotas.values())  # what rounding up to one page costs, it pays
            quotas[next(name for name in quotas if quotas[name] == largest)] -= 1
        return quotas[version] if self.shares else None

    def chunk_quota(self, version: str) -> int | None:
        return self._quota(version, self.num_chunks, 0) if self.shares else None

    def _quota(self, version: str, size: int, least: int) -> int:
        if version not in self.shares:
            return 0
        return max(least, floor(Fraction(str(self.shares[version])) * size))

    def always_gets(self, version: str) -> int:
        """Pages that a piece of the version gets for certain when nothing is held."""
        quotas = [self.page_quota(name) for name in self.shares]
        if sum(quota for quota in quotas if quota is not None) > self.num_pages:
            return 0
        quota = self.page_quota(version)
        return self.num_pages if quota is None else quota

    # Pages.

    def pages_by_version(self, world: World) -> Counter[str]:
        """Pages that a state, a piece or a copy of each version holds, each page once.

        A piece also holds its state's pages that it does not read, a forgotten user's too.
        """
        held = {
            (key.weights_version, page) for key, own in world.states.items() for page in own.pages
        }
        held |= {
            (r.key.weights_version, page)
            for r in world.open
            for page in (*r.block_table.tolist(), *r.state.pages.tolist())
        }
        held |= {(_version_of(job), page) for job in world.jobs for page in job.pages.tolist()}
        assert len({page for _, page in held}) == len(held), "a page of two versions"
        return Counter(version for version, _ in held)

    def pages_after(self, world: World, wanted: Wanted) -> dict[UserKey, int] | None:
        """Pages of each state once the piece has been planned; None when it cannot be."""
        counts = Counter({key: len(own.pages) for key, own in world.states.items()})
        used = self.pages_by_version(world)
        fresh = wanted.needed - min(wanted.kept, counts[wanted.key])
        shortage = fresh - (self.num_pages - used.total())
        busy = {reservation.key for reservation in world.open} | {wanted.key}
        takeable = [
            key
            for key in self.order
            if key in world.states and key not in busy and _can_lose_pages(world, key)
        ]
        taken = _take_one_by_one(
            shortage,
            wanted.key.weights_version,
            {key: counts[key] for key in takeable},
            used,
            {version: self.page_quota(version) for version in used},
        )
        missing = shortage - taken.total()
        if missing > 0:
            spare = counts[wanted.key] - wanted.kept
            if spare < missing or not _can_lose_pages(world, wanted.key):
                return None
            taken[wanted.key] = missing
        return {key: counts[key] - taken[key] for key in world.states}

    # Chunks.

    def chunks_by_version(self, world: World) -> Counter[str]:
        held = {(key.weights_version, c) for key, own in world.states.items() for c in own.chunks}
        held |= {
            (_version_of(job), slot // self.pages_per_chunk)
            for job in world.jobs
            for slot in job.host_slots.tolist()
        }
        assert len({chunk for _, chunk in held}) == len(held), "a chunk of two versions"
        return Counter(version for version, _ in held)

    def chunks_after(self, world: World, key: UserKey, device_len: int) -> dict[UserKey, int]:
        """Chunks of each state once a piece has been committed, and so offered for offload."""
        counts = Counter({other: len(own.chunks) for other, own in world.states.items()})
        full = device_len // self.page_size
        target = full * self.page_size
        wanted = -(-full // self.pages_per_chunk) - counts[key]
        if key.private_to or target <= world.states[key].offload_len or wanted <= 0:
            return dict(counts)
        used = self.chunks_by_version(world)
        free = self.num_chunks - used.total()
        pinned = {reservation.state for reservation in world.open}
        takeable = [
            other
            for other in self.order
            if other in world.states
            and other != key
            and world.states[other].state not in pinned
            and not world.jobs_of(other)
        ]
        taken = _take_one_by_one(
            wanted - free,
            key.weights_version,
            {other: counts[other] for other in takeable},
            used,
            {version: self.chunk_quota(version) for version in used},
        )
        counts.subtract(taken)
        counts[key] += min(wanted, free + taken.total())
        return dict(counts)


def _take_one_by_one(
    shortage: int,
    asker: str,
    holders: Mapping[UserKey, int],
    used: Mapping[str, int],
    quotas: Mapping[str, int | None],
) -> Counter[UserKey]:
    """What each of the holders (the oldest first) gives up.

    Every single page is asked for anew: the oldest user of any version that is above its quota at
    that moment gives it, else the oldest user of the asking version.
    """
    taken: Counter[UserKey] = Counter()
    left, used = dict(holders), dict(used)
    for _ in range(shortage):
        having = [key for key, count in left.items() if count > 0]
        above = [key for key in having if _is_above(key.weights_version, used, quotas)]
        own = [key for key in having if key.weights_version == asker]
        giver = next(iter(above or own), None)
        if giver is None:
            break
        taken[giver] += 1
        left[giver] -= 1
        used[giver.weights_version] -= 1
    return taken


def _is_above(version: str, used: Mapping[str, int], quotas: Mapping[str, int | None]) -> bool:
    quota = quotas[version]
    return quota is None or used[version] > quota


def _can_lose_pages(world: World, key: UserKey) -> bool:
    jobs = world.jobs_of(key)
    return all(job.direction is Direction.OFFLOAD and job in world.queued for job in jobs)


def _version_of(job: CopyJob) -> str:
    assert isinstance(job.owner, UserState)
    return job.owner.key.weights_version
