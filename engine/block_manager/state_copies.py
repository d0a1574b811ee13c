"""Which copies a user's state asks for, and what their progress means for it.

`host_len` rises page by page as an offload proceeds, and only contiguously: a job of an older
branch, or one that lies beyond a hole which an earlier failure left, counts for nothing. An
onload counts when its piece is committed; one that failed or came too late is a miss, and the
host copy is given up from its first page on.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.block_manager.copies_in_flight import CopyRecord
from engine.block_manager.reservation import CopyOutcome, Reservation
from engine.block_manager.space import Space
from engine.block_manager.tiers import Tiers
from engine.block_manager.user_state import UserState
from engine.metrics import Metrics
from engine.transfer.jobs import CopyJob, CopyProgress, Direction
from engine.types import Int32Array


class StateCopies:
    """Makes the jobs and settles their ends. Owned by the block manager (loop thread)."""

    __slots__ = ("_clock", "_layout", "_metrics", "_space", "_tiers")

    def __init__(
        self, tiers: Tiers, space: Space, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._tiers = tiers
        self._space = space
        self._layout = tiers.layout
        self._metrics = metrics
        self._clock = clock

    def open_onload(self, reservation: Reservation, first_page: int, pages: Int32Array) -> CopyJob:
        """The job that fills `pages` with the state's host pages from `first_page` on."""
        return self._open(Direction.ONLOAD, reservation.state, first_page, pages, reservation)

    def open_offload(self, state: UserState) -> CopyJob | None:
        """The job for the whole pages from `offload_len` on, as far as chunks can be had."""
        layout, tiers = self._layout, self._tiers
        target = layout.floor(state.device_len)
        if tiers.chunks.pool.size == 0 or target <= state.offload_len:
            return None
        wanted = layout.chunks_for(target) - state.num_chunks
        if wanted > 0:
            state.append_chunks(self._space.take_chunks(wanted, own=state))
            reach = state.num_chunks * layout.chunk_tokens
            if reach < target:
                self._metrics.add("offload_skipped_total")
                target = reach
            if target <= state.offload_len:
                return None
        first = layout.full_pages(state.offload_len)
        state.offload_len = target
        pages = state.pages[first : layout.full_pages(target)].copy()
        return self._open(Direction.OFFLOAD, state, first, pages, None)

    def _open(
        self,
        direction: Direction,
        state: UserState,
        first: int,
        pages: Int32Array,
        reservation: Reservation | None,
    ) -> CopyJob:
        last = first + len(pages)
        store = self._tiers.chunks
        job = CopyJob(
            direction=direction,
            first_page=first,
            pages=pages,
            host_slots=store.slots_of(state.chunks, first, last),
            owner=state,
            branch=state.branch,
            started_s=self._clock(),
        )
        chunks = store.chunks_of(state.chunks, first, last)
        record = CopyRecord(state=state, chunks=chunks, reservation=reservation)
        self._tiers.copies.open(job, record)
        return job

    def progress(self, progress: CopyProgress) -> None:
        """Take in what `CopyEngine.poll` reported."""
        job = progress.job
        record = self._tiers.copies.record(job)
        newly_done = progress.pages_done - record.pages_done
        if newly_done > 0:
            moved = self._layout.bytes_of(newly_done)
            self._metrics.add("copy_bytes_total", moved, job.direction.value)
            record.pages_done = progress.pages_done
        is_failed = progress.error is not None
        if is_failed and not record.is_failure_counted:
            self._metrics.add("copy_failures_total")
        if job.direction is Direction.OFFLOAD:
            self._extend_host(job, record, progress.is_finished)
        elif progress.is_finished:
            self._end_onload(record, is_failed)
        if progress.is_finished:
            self._tiers.copies.close(job)
            self._tiers.settle(record.state)

    def _extend_host(self, job: CopyJob, record: CopyRecord, is_finished: bool) -> None:
        state, layout = record.state, self._layout
        if not state.is_attached or job.branch != state.branch:
            return
        if layout.page_start(job.first_page) > state.host_len:
            return
        reached = layout.page_start(job.first_page + record.pages_done)
        state.host_len = max(state.host_len, reached)
        if is_finished and record.pages_done < job.num_pages:
            self._tiers.retract_offload(state, state.host_len)

    def _end_onload(self, record: CopyRecord, is_failed: bool) -> None:
        if record.reservation is not None:
            record.reservation.outcome = CopyOutcome.FAILED if is_failed else CopyOutcome.DONE
        elif record.is_wasted and not is_failed:
            self._add_wasted(record.pages_done)

    def fail_read(self, reservation: Reservation) -> None:
        """The piece's onload failed or came too late: the host copy is lost from there on."""
        job = reservation.onload
        if job is None:
            return
        record = self._tiers.copies.find(job)
        if record is not None:
            record.is_failure_counted = True
            record.is_wasted = True
            self._metrics.add("copy_failures_total")
            self._tiers.copies.cancel(job)
        if reservation.state.is_attached:
            self._tiers.cut_host(reservation.state, self._layout.page_start(job.first_page))

    def waste(self, reservation: Reservation) -> None:
        """The piece's onload serves nobody: cancelled, or counted once it is complete."""
        job = reservation.onload
        if job is None:
            return
        if reservation.outcome is CopyOutcome.DONE:
            self._add_wasted(job.num_pages)
            return
        record = self._tiers.copies.find(job)
        if record is not None:
            record.is_wasted = True
            self._tiers.copies.cancel(job)

    def let_go(self, reservation: Reservation) -> None:
        """The piece has ended; its onload, if it still runs, goes on without it."""
        if reservation.onload is not None:
            record = self._tiers.copies.find(reservation.onload)
            if record is not None:
                record.reservation = None

    def _add_wasted(self, num_pages: int) -> None:
        self._metrics.add("prefetch_wasted_bytes_total", self._layout.bytes_of(num_pages))
