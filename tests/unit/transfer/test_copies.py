"""What every copy engine does, native or not."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from engine.errors import InvariantError
from engine.testing.fakes import drain
from engine.transfer.jobs import CopyProgress, Direction

PAGES = [7, 2, 3, 4, 11, 0, 9]  # a run in the middle, no order around it
SLOTS = [0, 4, 5, 6, 1, 11, 10]  # slot 6 begins a chunk, so the run 4, 5, 6 must be split


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_layers", "page_size", "pages_per_chunk", "qk_dim", "v_dim"),
    [(1, 1, 1, 1, 1), (3, 2, 3, 4, 6), (2, 5, 4, 3, 3), (4, 16, 2, 8, 8)],
)
def test_pages_come_back_bit_for_bit_after_offload_and_onload(
    make_rig, dtype, num_layers, page_size, pages_per_chunk, qk_dim, v_dim
):
    rig = make_rig(
        dtype=dtype,
        num_layers=num_layers,
        page_size=page_size,
        pages_per_chunk=pages_per_chunk,
        num_chunks=12,
        qk_dim=qk_dim,
        v_dim=v_dim,
    )
    rig.randomize()
    before = [rig.pools.raw(layer).clone() for layer in range(num_layers)]
    rig.drain(rig.offload(PAGES, SLOTS))
    for layer in range(num_layers):
        rig.pools.raw(layer)[PAGES] = 0
    other_pages = [5, 6, 7, 8, 1, 10, 11]
    expected = [rig.pools.raw(layer).clone() for layer in range(num_layers)]
    rig.drain(rig.onload(other_pages, SLOTS))
    for layer in range(num_layers):
        expected[layer][other_pages] = before[layer][PAGES]
        assert torch.equal(rig.pools.raw(layer), expected[layer])


def test_an_offload_writes_its_slots_and_no_other_byte(rig):
    rig.randomize()
    expected = rig.arena.chunks.clone()
    for page, slot in zip(PAGES, SLOTS, strict=True):
        for layer in range(3):
            expected[slot // 3, layer, slot % 3] = rig.device_page(layer, page)
    pools_before = [rig.pools.raw(layer).clone() for layer in range(3)]
    rig.drain(rig.offload(PAGES, SLOTS))
    assert torch.equal(rig.arena.chunks, expected)
    assert all(torch.equal(rig.pools.raw(layer), pools_before[layer]) for layer in range(3))


def test_an_onload_is_reported_once_with_all_pages(rig):
    job = rig.onload(PAGES, SLOTS)
    assert rig.drain(job) == [CopyProgress(job, 7, True, None)]
    assert job.succeeded is True
    assert rig.copies.poll() == []


def test_an_offload_reports_pages_that_only_rise_and_ends_with_all(rig):
    job = rig.offload(PAGES, SLOTS)
    reports = rig.drain(job)
    pages = [report.pages_done for report in reports]
    assert pages == sorted(pages)
    assert reports[-1] == CopyProgress(job, 7, True, None)
    assert not any(report.is_finished for report in reports[:-1])


def test_an_empty_job_ends(rig):
    job = rig.onload([], [])
    assert rig.copies.wait_layer(job, 2, time.monotonic() + 60)
    assert rig.drain(job) == [CopyProgress(job, 0, True, None)]


def test_jobs_of_one_direction_end_in_order_of_submission(rig):
    jobs = [rig.offload(PAGES, SLOTS) for _ in range(100)]
    ends = [report.job for report in rig.drain(*jobs) if report.is_finished]
    assert ends == jobs


def test_later_jobs_of_one_direction_overwrite_earlier_ones(rig):
    rig.randomize()
    rig.drain(*(rig.offload([page], [0]) for page in range(12)))
    for layer in range(3):
        assert torch.equal(rig.host_page(layer, 0), rig.device_page(layer, 11))


def test_handles_and_start_times_are_set_at_submission(rig):
    before = time.monotonic()
    first, second = rig.onload([0], [0]), rig.offload([1], [1])
    assert before <= first.started_s <= second.started_s <= time.monotonic()
    assert first.handle != second.handle
    rig.drain(first, second)


def test_every_layer_is_ready_with_its_bytes_when_waited_for(rig):
    rig.randomize()
    job = rig.onload(PAGES, SLOTS)
    for layer in range(3):
        assert rig.copies.wait_layer(job, layer, time.monotonic() + 60)
        for page, slot in zip(PAGES, SLOTS, strict=True):
            assert torch.equal(rig.device_page(layer, page), rig.host_page(layer, slot))
    rig.drain(job)


def test_layers_stay_ready_after_the_end_was_polled(rig):
    job = rig.onload(PAGES, SLOTS)
    rig.drain(job)
    assert rig.copies.wait_layer(job, 0, 0.0)
    assert rig.copies.wait_layer(job, 2, 0.0)


def test_a_finished_job_cannot_be_cancelled(rig):
    job = rig.onload([0], [0])
    rig.drain(job)
    assert not rig.copies.cancel(job)
    assert job.succeeded is True


def test_an_end_wakes_the_core(rig):
    rig.wake.clear()
    job = rig.onload([0], [0])
    assert rig.wake.wait(60)
    rig.wake.clear()
    assert [report.job for report in rig.drain(job)] == [job]


def test_every_end_is_seen_by_a_loop_that_polls_only_when_woken(rig):
    waiting = set()
    for _ in range(50):
        waiting |= {rig.offload(PAGES, SLOTS), rig.onload(PAGES, SLOTS)}
        while waiting:
            assert rig.wake.wait(60), "an end did not wake the loop"
            rig.wake.clear()
            waiting -= {report.job for report in rig.copies.poll() if report.is_finished}


@pytest.mark.parametrize(
    ("pages", "slots", "word"),
    [
        ([12], [0], "pages"),
        ([-1], [0], "pages"),
        ([0], [12], "host_slots"),
        ([0], [0, 1], "2 host"),
    ],
)
def test_a_job_with_an_id_that_does_not_exist_is_refused_before_anything_moves(
    rig, pages, slots, word
):
    rig.randomize()
    before = rig.arena.chunks.clone()
    with pytest.raises(InvariantError, match=word):
        rig.offload(pages, slots)
    assert torch.equal(rig.arena.chunks, before)


def test_ids_of_another_width_are_refused(rig):
    job = rig.job(Direction.ONLOAD, [0], [0])
    job.pages = job.pages.astype(np.int64)
    with pytest.raises(InvariantError, match="int32"):
        rig.copies.submit(job)


def test_the_null_page_cannot_be_copied(rig):
    with pytest.raises(InvariantError, match=r"\[0, 12\)"):
        rig.onload([rig.pools.null_page], [0])


def test_close_is_idempotent_and_ends_that_came_before_can_still_be_polled(rig):
    job = rig.onload([0], [0])
    rig.copies.wait_layer(job, 2, time.monotonic() + 60)
    rig.copies.close()
    rig.copies.close()
    assert [report.job for report in rig.copies.poll()] == [job]


def test_a_waiting_thread_is_released_when_its_job_ends(rig):
    rig.randomize()
    answers = []
    job = rig.job(Direction.ONLOAD, PAGES, SLOTS)
    for _ in range(20):
        rig.copies.submit(job)
        threads = [
            threading.Thread(
                target=lambda layer=layer: answers.append(
                    rig.copies.wait_layer(job, layer, time.monotonic() + 60)
                )
            )
            for layer in range(3)
        ]
        for thread in threads:
            thread.start()
        drain(rig.copies, [job])
        for thread in threads:
            thread.join()
        job.succeeded = None
    assert answers == [True] * 60
