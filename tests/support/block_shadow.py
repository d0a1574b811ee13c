"""A small model of user state without bytes, for the block manager's property tests.

Every page slot and every host slot carries a tag: the user and the tokens that its K/V row would be
a function of. Steps and copies write tags where the engine would write rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.block_manager.fingerprint import HashChain
from engine.block_manager.user_state import UserKey
from engine.transfer.jobs import CopyJob, Direction

Tokens = list[int]
Tag = tuple[UserKey, tuple[int, ...]]
GARBAGE = None


def chain_of(tokens: Sequence[int], key: UserKey, page_size: int) -> HashChain:
    records = np.array(tokens, dtype=np.int64).reshape(len(tokens), 1)
    return HashChain.from_records(records, key.weights_version.encode(), page_size)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


class Expected(NamedTuple):
    matched: int
    is_prefix: bool
    diverges: bool


def expected_match(known: Sequence[int], history: Sequence[int], page_size: int) -> Expected:
    """What a look-up must find, from the tokens themselves."""
    common = common_prefix(known, history)
    if common == len(known):
        return Expected(common, False, False)
    boundary = common // page_size * page_size
    if len(history) < len(known) and boundary == len(history) // page_size * page_size:
        return Expected(boundary, True, False)
    return Expected(boundary, False, True)


class Shadow:
    """What the bytes would be: tags by page slot and by host slot."""

    def __init__(self, num_pages: int, num_host_slots: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = [[GARBAGE] * page_size for _ in range(num_pages)]
        self.host = [[GARBAGE] * page_size for _ in range(num_host_slots)]
        self.read_at_start: dict[CopyJob, list[list[Tag | None]]] = {}

    def poison(self, pages: np.ndarray) -> None:
        for page in pages:
            self.pages[int(page)][:] = [GARBAGE] * self.page_size

    def row(self, table: np.ndarray, index: int) -> Tag | None:
        return self.pages[int(table[index // self.page_size])][index % self.page_size]

    def write_row(self, table: np.ndarray, index: int, tag: Tag) -> None:
        self.pages[int(table[index // self.page_size])][index % self.page_size] = tag

    def _sides(self, job: CopyJob) -> tuple[list[list[Tag | None]], list[list[Tag | None]]]:
        pages = [self.pages[int(page)] for page in job.pages]
        slots = [self.host[int(slot)] for slot in job.host_slots]
        return (slots, pages) if job.direction is Direction.ONLOAD else (pages, slots)

    def start(self, job: CopyJob) -> None:
        """From now on the destination may hold anything."""
        source, destination = self._sides(job)
        self.read_at_start[job] = [list(tags) for tags in source]
        for tags in destination:
            tags[:] = [GARBAGE] * self.page_size

    def copy(self, job: CopyJob, first: int, last: int) -> None:
        """Pages [first, last) arrive; a source that changed meanwhile arrives torn."""
        source, destination = self._sides(job)
        for i in range(first, last):
            same = source[i] == self.read_at_start[job][i]
            destination[i][:] = source[i] if same else [GARBAGE] * self.page_size
