"""NativeCopyEngine: copies in native threads that never hold the GIL.

A thin face of `csrc/cpu/copy_worker.h`, which has the contract; here are only the objects that
the numbers stand for.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import numpy as np
import torch

from engine.errors import ConfigError
from engine.native_library import load_library
from engine.platforms.cpu import HostArena, KvPools, Wake
from engine.transfer.fault import CopyFault
from engine.transfer.jobs import CopyJob, CopyProgress, Direction
from engine.transfer.runs import check_job
from engine.types import Int64Array

_DIRECTIONS = {Direction.ONLOAD: 0, Direction.OFFLOAD: 1}
_ERRORS = {1: "injected"}
_READY, _UNKNOWN = 1, 3
_POLL_BATCH = 64


class NativeCopyEngine:
    """One native thread per direction.

    Args:
        wake: Set when a job ended or an offload got further.
        clock: Monotonic seconds; stamps `started_s` and measures `deadline_s`.

    Attributes:
        fault: Applied to every job submitted from now on.
        units_done: int64 [2]: units (layers of onloads, pages of offloads) copied so far. Written
            by the workers while Python runs; reading it calls nothing and releases nothing.

    Raises ConfigError when the native library is not there.
    """

    def __init__(
        self,
        pools: KvPools,
        arena: HostArena,
        wake: Wake,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        reason = load_library()
        if reason is not None:
            raise ConfigError(f"no native copy workers: {reason}; use workers 'python'")
        self.fault = CopyFault()
        self.units_done: Int64Array = np.zeros(2, dtype=np.int64)
        self._num_pages = pools.num_pages
        self._num_slots = arena.num_chunks * arena.pages_per_chunk
        self._clock = clock
        self._jobs: dict[int, CopyJob] = {}
        self._progress = torch.zeros(_POLL_BATCH, 4, dtype=torch.int64)
        self._rows = self._progress.numpy()
        layers = [pools.raw(layer).data_ptr() for layer in range(pools.num_layers)]
        self._worker: int = torch.ops.engine.copy_open(
            torch.tensor(layers, dtype=torch.int64),
            arena.chunks.data_ptr(),
            pools.num_pages,
            arena.num_chunks,
            arena.pages_per_chunk,
            pools.page_bytes,
            wake.write_fd,
            torch.from_numpy(self.units_done),
        )
        # The finalizer holds what the threads write to, so no memory goes before they stop.
        self._free = weakref.finalize(
            self, _free_worker, self._worker, pools, arena, wake, self.units_done
        )

    def submit(self, job: CopyJob) -> None:
        check_job(job, num_pages=self._num_pages, num_slots=self._num_slots)
        fail_unit = self.fault.fail_unit
        job.started_s = self._clock()
        job.handle = torch.ops.engine.copy_submit(
            self._worker,
            _DIRECTIONS[job.direction],
            torch.from_numpy(np.ascontiguousarray(job.pages)),
            torch.from_numpy(np.ascontiguousarray(job.host_slots)),
            self.fault.job_delay_us,
            self.fault.unit_delay_us,
            -1 if fail_unit is None else fail_unit,
        )
        self._jobs[job.handle] = job

    def cancel(self, job: CopyJob) -> bool:
        if self._jobs.get(job.handle) is not job:
            return False
        if not torch.ops.engine.copy_cancel(self._worker, job.handle):
            return False
        job.succeeded = False
        del self._jobs[job.handle]
        return True

    def poll(self) -> list[CopyProgress]:
        progress: list[CopyProgress] = []
        while True:
            count: int = torch.ops.engine.copy_poll(self._worker, self._progress)
            for handle, pages_done, is_finished, error in self._rows[:count].tolist():
                progress.append(self._report(handle, pages_done, bool(is_finished), error))
            if count < _POLL_BATCH:
                return progress

    def wait_layer(self, job: CopyJob, layer: int, deadline_s: float) -> bool:
        if job.succeeded is not None:
            return job.succeeded
        result: int = torch.ops.engine.copy_wait_layer(
            self._worker, job.handle, layer, max(0.0, deadline_s - self._clock())
        )
        # The core may have polled the end meanwhile; it marks the job before it forgets it.
        return job.succeeded is True if result == _UNKNOWN else result == _READY

    def close(self) -> None:
        torch.ops.engine.copy_close(self._worker)

    def _report(self, handle: int, pages_done: int, is_finished: bool, error: int) -> CopyProgress:
        job = self._jobs[handle]
        if is_finished:
            job.succeeded = error == 0
            torch.ops.engine.copy_release(self._worker, handle)
            del self._jobs[handle]
        message = _ERRORS.get(error, f"native error {error}") if error else None
        return CopyProgress(job, pages_done, is_finished, message)


def _free_worker(worker: int, *held: object) -> None:
    """Stop and forget a worker; `held` is kept alive until then."""
    torch.ops.engine.copy_free(worker)
