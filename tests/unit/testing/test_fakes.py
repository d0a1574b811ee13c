"""The fakes do what they are told, when they are told."""

from __future__ import annotations

import numpy as np
import pytest

from engine.testing.fakes import FakeClock, ManualCopyEngine, ManualExecutor, drain
from engine.transfer.jobs import CopyJob, CopyProgress, Direction


def _job(direction: Direction = Direction.OFFLOAD, num_pages: int = 3) -> CopyJob:
    ids = np.arange(num_pages, dtype=np.int32)
    return CopyJob(
        direction=direction, first_page=0, pages=ids, host_slots=ids, owner=None, branch=0
    )


def test_a_fake_clock_moves_only_when_told():
    clock = FakeClock(5.0)
    assert (clock(), clock()) == (5.0, 5.0)
    clock.advance(1.5)
    assert clock() == 6.5


def test_a_manual_executor_runs_one_function_at_a_time():
    executor = ManualExecutor()
    executor.submit(lambda: 1)
    executor.submit(lambda: 1 // 0)
    assert executor.done() is None
    executor.run_next()
    assert executor.done().result() == 1
    executor.close()
    with pytest.raises(ZeroDivisionError):
        executor.done().result()


def test_automatic_copies_end_at_the_next_poll():
    copies, jobs = ManualCopyEngine(clock=FakeClock(7.0)), [_job(), _job(Direction.ONLOAD)]
    for job in jobs:
        copies.submit(job)
    assert copies.poll() == [CopyProgress(job, 3, True, None) for job in jobs]
    assert [job.succeeded for job in jobs] == [True, True]
    assert [job.started_s for job in jobs] == [7.0, 7.0]
    assert copies.poll() == []


def test_an_automatic_onload_is_there_when_waited_for():
    copies, job = ManualCopyEngine(), _job(Direction.ONLOAD)
    copies.submit(job)
    assert copies.wait_layer(job, 0, 0.0)
    drain(copies, [job])
    assert copies.wait_layer(job, 5, 0.0)


def test_manual_copies_move_when_told():
    copies, job = ManualCopyEngine(is_automatic=False), _job()
    copies.submit(job)
    assert copies.poll() == []
    copies.advance(job, 2)
    assert not copies.cancel(job)
    assert copies.poll() == [CopyProgress(job, 2, False, None)]
    copies.fail(job, pages_done=2)
    assert copies.poll() == [CopyProgress(job, 2, True, "injected")]
    assert job.succeeded is False


def test_a_queued_manual_job_is_cancelled():
    copies, job = ManualCopyEngine(is_automatic=False), _job(Direction.ONLOAD)
    copies.submit(job)
    assert not copies.wait_layer(job, 0, 0.0)
    assert copies.cancel(job)
    assert not copies.cancel(job)
    assert copies.poll() == []
    assert job.succeeded is False


def test_drain_gives_up_loudly():
    copies, job = ManualCopyEngine(is_automatic=False), _job()
    copies.submit(job)
    with pytest.raises(TimeoutError, match="1 copy jobs"):
        drain(copies, [job], timeout_s=0.01)
