"""FaultyCopyEngine over both copy engines: held, delayed and failed jobs keep the contract."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from engine.testing.fakes import FaultyCopyEngine
from engine.transfer.jobs import CopyProgress, Direction


@pytest.fixture
def faulty(rig):
    """The rig, its copy engine wrapped."""
    rig.copies = FaultyCopyEngine(rig.copies, rig.wake)
    rig.randomize()
    return rig


def test_without_faults_it_changes_nothing(faulty):
    jobs = [faulty.onload([7, 2], [0, 4]), faulty.offload([5], [3])]
    assert {report.job for report in faulty.drain(*jobs) if report.is_finished} == set(jobs)
    assert [job.succeeded for job in jobs] == [True, True]
    assert faulty.copies.submitted == jobs
    for layer in range(3):
        assert torch.equal(faulty.device_page(layer, 7), faulty.host_page(layer, 0))
        assert torch.equal(faulty.device_page(layer, 5), faulty.host_page(layer, 3))


def test_held_jobs_start_when_released_in_order(faulty):
    faulty.copies.hold()
    before = faulty.device_page(0, 7).clone()
    jobs = [faulty.onload([7], [slot]) for slot in (0, 1, 2)]
    assert faulty.copies.poll() == []
    assert faulty.copies.held_jobs(Direction.ONLOAD) == jobs
    assert torch.equal(faulty.device_page(0, 7), before)
    faulty.copies.release()
    assert [report.job for report in faulty.drain(*jobs)] == jobs
    assert torch.equal(faulty.device_page(0, 7), faulty.host_page(0, 2))


def test_one_direction_is_held_while_the_other_runs(faulty):
    faulty.copies.hold(Direction.OFFLOAD)
    held, free = faulty.offload([1], [1]), faulty.onload([2], [2])
    faulty.drain(free)
    assert held.succeeded is None
    assert faulty.copies.release_next(Direction.OFFLOAD) is held
    faulty.drain(held)


def test_a_held_job_is_cancelled_silently(faulty):
    faulty.copies.hold()
    job = faulty.onload([7], [0])
    assert faulty.copies.cancel(job)
    assert not faulty.copies.cancel(job)
    faulty.copies.release()
    assert faulty.copies.poll() == []
    assert job.succeeded is False


def test_waiting_for_a_held_job_ends_at_its_deadline_or_with_its_bytes(faulty):
    faulty.copies.hold()
    job = faulty.onload([7], [0])
    assert not faulty.copies.wait_layer(job, 0, time.monotonic() + 0.01)
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(faulty.copies.wait_layer(job, 2, time.monotonic() + 60))
    )
    thread.start()
    faulty.copies.release()
    thread.join()
    assert answers == [True]
    faulty.drain(job)


def test_the_nth_onload_fails_with_nothing_to_show(faulty):
    faulty.copies.fail_nth(2, Direction.ONLOAD)
    jobs = [faulty.onload([page], [page]) for page in (1, 2, 3)]
    assert not faulty.copies.wait_layer(jobs[1], 0, time.monotonic() + 60)
    ends = [report for report in faulty.drain(*jobs) if report.is_finished]
    assert ends == [
        CopyProgress(jobs[0], 1, True, None),
        CopyProgress(jobs[1], 0, True, "injected"),
        CopyProgress(jobs[2], 1, True, None),
    ]
    assert jobs[1].succeeded is False


def test_a_failed_offload_has_copied_the_pages_it_reports(faulty):
    faulty.copies.fail_nth(1, Direction.OFFLOAD, after_pages=2)
    third = faulty.host_page(0, 5).clone()
    job = faulty.offload([7, 8, 9], [3, 4, 5])
    assert faulty.drain(job)[-1] == CopyProgress(job, 2, True, "injected")
    for layer in range(3):
        assert torch.equal(faulty.host_page(layer, 4), faulty.device_page(layer, 8))
    assert torch.equal(faulty.host_page(0, 5), third)


def test_delayed_jobs_start_by_themselves_and_wake_the_core(faulty):
    faulty.copies.delay(1.0)
    job = faulty.onload([7], [0])
    assert faulty.copies.held_jobs(Direction.ONLOAD) == [job]
    assert faulty.wake.wait(60)
    faulty.drain(job)
    assert job.succeeded is True


def test_close_drops_held_jobs(faulty):
    faulty.copies.hold()
    job = faulty.onload([7], [0])
    faulty.copies.close()
    assert job.succeeded is False
    assert not faulty.copies.wait_layer(job, 0, time.monotonic() + 60)
