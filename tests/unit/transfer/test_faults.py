"""Copies that are slow, fail, are cancelled or come too late, in both engines."""

from __future__ import annotations

import time

import torch

from engine.transfer.fault import CopyFault
from engine.transfer.jobs import CopyProgress, Direction

SLOW = CopyFault(job_delay_us=200_000)


def test_a_queued_job_is_cancelled_and_touches_nothing(rig):
    rig.randomize()
    before = [rig.pools.raw(layer).clone() for layer in range(3)]
    rig.copies.fault = SLOW
    first, second, third = rig.onload([], []), rig.onload([1], [1]), rig.onload([], [])
    assert rig.copies.cancel(second)
    ends = [report.job for report in rig.drain(first, third)]
    assert ends == [first, third]
    assert second.succeeded is False
    assert not rig.copies.wait_layer(second, 0, time.monotonic() + 60)
    assert all(torch.equal(rig.pools.raw(layer), before[layer]) for layer in range(3))


def test_a_started_job_is_not_cancelled_and_runs_to_its_end(rig):
    rig.copies.fault = CopyFault(unit_delay_us=100_000)
    job = rig.onload([1], [1])
    assert rig.copies.wait_layer(job, 0, time.monotonic() + 60)
    assert not rig.copies.cancel(job)
    assert rig.drain(job) == [CopyProgress(job, 1, True, None)]


def test_a_job_cannot_be_cancelled_twice(rig):
    rig.copies.fault = SLOW
    first, second = rig.onload([], []), rig.onload([1], [1])
    assert rig.copies.cancel(second)
    assert not rig.copies.cancel(second)
    rig.drain(first)


def test_directions_do_not_wait_for_each_other(rig):
    rig.copies.fault = CopyFault(job_delay_us=300_000)
    slow = rig.offload([0], [0])
    rig.copies.fault = CopyFault()
    quick = rig.onload([1], [1])
    ends = [report.job for report in rig.drain(slow, quick) if report.is_finished]
    assert ends == [quick, slow]


def test_layers_become_ready_one_by_one_in_order(rig):
    rig.randomize()
    before = [rig.pools.raw(layer).clone() for layer in range(3)]
    rig.copies.fault = CopyFault(unit_delay_us=300_000)
    job = rig.onload([5], [3])
    for layer in range(3):
        assert rig.copies.wait_layer(job, layer, time.monotonic() + 60)
        assert torch.equal(rig.device_page(layer, 5), rig.host_page(layer, 3))
        for later in range(layer + 1, 3):
            assert torch.equal(rig.device_page(later, 5), before[later][5])
    rig.drain(job)


def test_a_layer_that_is_not_there_by_the_deadline_is_late_and_the_job_goes_on(rig):
    rig.copies.fault = CopyFault(job_delay_us=400_000)
    job = rig.onload([5], [3])
    assert not rig.copies.wait_layer(job, 0, time.monotonic() + 0.001)
    assert not rig.copies.wait_layer(job, 0, 0.0)
    assert job.succeeded is None
    assert rig.copies.wait_layer(job, 2, time.monotonic() + 60)
    assert rig.drain(job) == [CopyProgress(job, 1, True, None)]


def test_a_failed_onload_ends_with_its_error_and_the_next_job_runs(rig):
    rig.copies.fault = CopyFault(fail_unit=1)
    failing = rig.onload([5], [3])
    rig.copies.fault = CopyFault()
    job = rig.onload([6], [4])
    assert not rig.copies.wait_layer(failing, 1, time.monotonic() + 60)
    assert not rig.copies.wait_layer(failing, 2, time.monotonic() + 60)
    assert rig.drain(failing, job) == [
        CopyProgress(failing, 0, True, "injected"),
        CopyProgress(job, 1, True, None),
    ]
    assert failing.succeeded is False
    assert not rig.copies.wait_layer(failing, 2, time.monotonic() + 60)


def test_a_failed_offload_keeps_the_pages_before_the_failure(rig):
    rig.randomize()
    old_page = rig.host_page(0, 5).clone()
    rig.copies.fault = CopyFault(fail_unit=2)
    job = rig.offload([7, 8, 1, 2], [3, 4, 5, 6])
    reports = rig.drain(job)
    assert reports[-1] == CopyProgress(job, 2, True, "injected")
    for layer in range(3):
        assert torch.equal(rig.host_page(layer, 3), rig.device_page(layer, 7))
        assert torch.equal(rig.host_page(layer, 4), rig.device_page(layer, 8))
    assert torch.equal(rig.host_page(0, 5), old_page)


def test_offload_progress_is_reported_page_by_page(rig):
    rig.copies.fault = CopyFault(unit_delay_us=200_000)
    job = rig.offload([7, 8, 1], [3, 4, 5])
    reports = []
    while not reports or not reports[-1].is_finished:
        assert rig.wake.wait(60)
        rig.wake.clear()
        reports += rig.copies.poll()
    assert [(report.job, report.pages_done) for report in reports] == [(job, 1), (job, 2), (job, 3)]


def test_a_page_is_complete_in_all_layers_when_it_is_reported(rig):
    rig.randomize()
    rig.copies.fault = CopyFault(unit_delay_us=200_000)
    rig.offload([7, 8], [3, 4])
    assert rig.wake.wait(60)
    pages_done = rig.copies.poll()[0].pages_done  # more than one if this thread had to wait
    assert pages_done >= 1
    for host_slot, page in list(zip([3, 4], [7, 8], strict=True))[:pages_done]:
        for layer in range(3):
            assert torch.equal(rig.host_page(layer, host_slot), rig.device_page(layer, page))


def test_close_drops_what_has_not_started_and_waits_for_the_rest(rig):
    rig.randomize()
    rig.copies.fault = CopyFault(unit_delay_us=100_000)
    running, waiting = rig.onload([1], [1]), rig.onload([2], [2])
    before = rig.device_page(0, 2).clone()
    assert rig.copies.wait_layer(running, 0, time.monotonic() + 60)
    rig.copies.close()
    assert rig.copies.poll() == [CopyProgress(running, 1, True, None)]
    assert not rig.copies.wait_layer(waiting, 0, time.monotonic() + 60)
    assert torch.equal(rig.device_page(0, 2), before)
    assert torch.equal(rig.device_page(2, 1), rig.host_page(2, 1))


def test_a_job_for_each_direction_of_one_page_copies_both_ways(rig):
    rig.randomize()
    page = rig.device_page(1, 0).clone()
    rig.drain(rig.offload([0], [0]))
    rig.drain(rig.onload([1], [0]))
    assert rig.job(Direction.ONLOAD, [1], [0]).succeeded is None
    assert torch.equal(rig.device_page(1, 1), page)
