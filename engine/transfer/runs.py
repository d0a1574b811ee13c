"""Runs: neighbouring pages of a job whose bytes lie side by side in both tiers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.errors import InvariantError
from engine.transfer.jobs import CopyJob


class Run(NamedTuple):
    """`num_pages` pages from `page` on, in chunk `chunk` from `chunk_page` on."""

    page: int
    chunk: int
    chunk_page: int
    num_pages: int


def merged_runs(job: CopyJob, pages_per_chunk: int) -> list[Run]:
    """The job as the fewest runs, in the job's order: consecutive page ids and host slots, within
    one chunk (a chunk keeps its layers apart, so a run cannot cross into the next)."""
    pages, slots = job.pages, job.host_slots
    if len(pages) == 0:
        return []
    is_start = np.ones(len(pages), dtype=np.bool_)
    is_start[1:] = (
        (np.diff(pages) != 1) | (np.diff(slots) != 1) | (slots[1:] % pages_per_chunk == 0)
    )
    starts = np.flatnonzero(is_start)
    lengths = np.diff(starts, append=len(pages))
    return [
        Run(
            page=int(pages[start]),
            chunk=int(slots[start]) // pages_per_chunk,
            chunk_page=int(slots[start]) % pages_per_chunk,
            num_pages=int(length),
        )
        for start, length in zip(starts, lengths, strict=True)
    ]


def check_job(job: CopyJob, *, num_pages: int, num_slots: int) -> None:
    """Raise InvariantError unless every id of the job exists.

    A wrong id would write over another user's bytes, so it is checked in release builds too.
    """
    for name, ids, bound in (
        ("pages", job.pages, num_pages),
        ("host_slots", job.host_slots, num_slots),
    ):
        if ids.dtype != np.int32 or ids.ndim != 1:
            raise InvariantError(f"copy job: {name} must be int32 [n], not {ids.dtype} {ids.shape}")
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < bound):
            raise InvariantError(
                f"copy job: {name} range over [{int(ids.min())}, {int(ids.max())}], "
                f"but only [0, {bound}) exist"
            )
    if len(job.pages) != len(job.host_slots):
        raise InvariantError(
            f"copy job: {len(job.pages)} pages but {len(job.host_slots)} host slots"
        )
