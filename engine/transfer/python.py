"""PythonCopyEngine: copies in Python threads, for machines without a C++ compiler.

The same contract as the native workers, but every copy needs the GIL to start and to end, so
beside a busy Python thread it is many times slower.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.platforms.cpu import HostArena, KvPools, Wake
from engine.transfer.fault import CopyFault
from engine.transfer.jobs import CopyJob, CopyProgress, Direction
from engine.transfer.runs import Run, check_job, merged_runs


class _InjectedError(Exception):
    """A test asked for this failure."""


@dataclass(slots=True, eq=False)
class _Record:
    """A job under way. Every field but the first three is guarded by the engine's condition."""

    job: CopyJob
    runs: list[Run]
    fault: CopyFault
    layers_done: int = 0
    pages_done: int = 0
    has_started: bool = False
    is_finished: bool = False
    error: str | None = None


@dataclass(slots=True, eq=False)
class _Lane:
    """One direction: its queue and its thread."""

    queue: deque[_Record] = field(default_factory=deque)
    thread: threading.Thread | None = None


class PythonCopyEngine:
    """One thread per direction over numpy views of the pools and the arena.

    Args:
        wake: Set when a job ended or an offload got further.
        clock: Monotonic seconds; stamps `started_s` and measures `deadline_s`.

    Attributes:
        fault: Applied to every job submitted from now on.
    """

    def __init__(
        self,
        pools: KvPools,
        arena: HostArena,
        wake: Wake,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fault = CopyFault()
        self._pages = [pools.raw(layer).numpy() for layer in range(pools.num_layers)]
        self._chunks = arena.chunks.numpy()
        self._num_pages = pools.num_pages
        self._num_slots = arena.num_chunks * arena.pages_per_chunk
        self._pages_per_chunk = arena.pages_per_chunk
        self._wake = wake
        self._clock = clock
        self._changed = threading.Condition()
        self._records: dict[int, _Record] = {}
        self._news: deque[_Record] = deque()
        self._next_handle = 0
        self._is_closed = False
        self._lanes = {direction: _Lane() for direction in Direction}
        for direction, lane in self._lanes.items():
            lane.thread = threading.Thread(
                target=self._loop, args=(direction,), name=direction.value, daemon=True
            )
            lane.thread.start()

    def submit(self, job: CopyJob) -> None:
        check_job(job, num_pages=self._num_pages, num_slots=self._num_slots)
        record = _Record(job, merged_runs(job, self._pages_per_chunk), self.fault)
        with self._changed:
            assert not self._is_closed, "submit after close"
            job.handle = self._next_handle
            job.started_s = self._clock()
            self._next_handle += 1
            self._records[job.handle] = record
            self._lanes[job.direction].queue.append(record)
            self._changed.notify_all()

    def cancel(self, job: CopyJob) -> bool:
        with self._changed:
            record = self._records.get(job.handle)
            if record is None or record.has_started:
                return False
            self._lanes[job.direction].queue.remove(record)
            self._drop(record)
            return True

    def poll(self) -> list[CopyProgress]:
        progress = []
        with self._changed:
            while self._news:
                record = self._news.popleft()
                job = record.job
                if record.is_finished:
                    job.succeeded = record.error is None
                    del self._records[job.handle]
                progress.append(
                    CopyProgress(job, record.pages_done, record.is_finished, record.error)
                )
        return progress

    def wait_layer(self, job: CopyJob, layer: int, deadline_s: float) -> bool:
        with self._changed:
            record = self._records.get(job.handle)
            if record is None:
                return job.succeeded is True
            self._changed.wait_for(
                lambda: record.layers_done > layer or record.is_finished,
                timeout=max(0.0, deadline_s - self._clock()),
            )
            return record.layers_done > layer and record.error is None

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for lane in self._lanes.values():
                while lane.queue:
                    self._drop(lane.queue.popleft())
            self._changed.notify_all()
        for lane in self._lanes.values():
            assert lane.thread is not None
            lane.thread.join()

    def _drop(self, record: _Record) -> None:
        """Forget a job that has not started; the caller holds the condition."""
        record.is_finished, record.error = True, "cancelled"
        record.job.succeeded = False
        del self._records[record.job.handle]
        self._changed.notify_all()

    def _loop(self, direction: Direction) -> None:
        queue = self._lanes[direction].queue
        copy = self._onload if direction is Direction.ONLOAD else self._offload
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(queue) or self._is_closed)
                if not queue:
                    return
                record = queue.popleft()
                record.has_started = True
            error = None
            try:
                _sleep(record.fault.job_delay_us)
                copy(record)
            except _InjectedError:
                error = "injected"
            except Exception as failure:  # any failure of a copy is a miss, reported by poll
                error = f"{type(failure).__name__}: {failure}"
            self._finish(record, error)

    def _onload(self, record: _Record) -> None:
        for layer, pages in enumerate(self._pages):
            _begin_unit(record, layer)
            for run in record.runs:
                chunk = self._chunks[run.chunk, layer]
                pages[run.page : run.page + run.num_pages] = chunk[
                    run.chunk_page : run.chunk_page + run.num_pages
                ]
            with self._changed:
                record.layers_done = layer + 1
                self._changed.notify_all()

    def _offload(self, record: _Record) -> None:
        group = 1 if record.fault != CopyFault() else self._pages_per_chunk
        for run in record.runs:
            for at in range(0, run.num_pages, group):
                count = min(group, run.num_pages - at)
                _begin_unit(record, record.pages_done)
                for layer, pages in enumerate(self._pages):
                    chunk = self._chunks[run.chunk, layer]
                    chunk[run.chunk_page + at : run.chunk_page + at + count] = pages[
                        run.page + at : run.page + at + count
                    ]
                with self._changed:
                    record.pages_done += count
                    if record.pages_done < record.job.num_pages:
                        self._report(record)

    def _finish(self, record: _Record, error: str | None) -> None:
        with self._changed:
            record.is_finished, record.error = True, error
            if record.job.direction is Direction.ONLOAD and error is None:
                record.pages_done = record.job.num_pages
            self._report(record)
            self._changed.notify_all()

    def _report(self, record: _Record) -> None:
        """Queue the record for poll, once and in the order of its newest news."""
        if record in self._news:
            self._news.remove(record)
        self._news.append(record)
        self._wake.set()


def _begin_unit(record: _Record, unit: int) -> None:
    _sleep(record.fault.unit_delay_us)
    if unit == record.fault.fail_unit:
        raise _InjectedError


def _sleep(microseconds: int) -> None:
    if microseconds:
        time.sleep(microseconds / 1e6)
