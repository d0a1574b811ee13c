"""What only the native workers promise: they need the GIL for nothing, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from engine.testing.fakes import FakeClock
from engine.transfer.fault import CopyFault
from engine.transfer.jobs import Direction
from engine.transfer.native import NativeCopyEngine

# Long enough that no interpreter lock changes hands by itself during a test.
NEVER_S = 3600.0


def test_copies_complete_while_pure_python_keeps_the_core_busy(native_rig):
    rig = native_rig
    rig.randomize()
    rig.copies.fault = CopyFault(unit_delay_us=1000)
    units_done = memoryview(rig.copies.units_done)
    may_run, bystander_ran = threading.Event(), []
    bystander = threading.Thread(target=lambda: (may_run.wait(), bystander_ran.append(True)))
    bystander.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(NEVER_S)
    try:
        job = rig.onload([7, 2, 3], [0, 4, 5])
        may_run.set()
        spins = 0
        while units_done[0] < 3:  # never blocks, never lets another Python thread run
            spins += 1
        # A Python thread that was ready all the time got no turn, the copies did.
        assert not bystander_ran
        assert spins > 0
    finally:
        sys.setswitchinterval(interval)
    bystander.join()
    for layer in range(3):
        for page, slot in [(7, 0), (2, 4), (3, 5)]:
            assert torch.equal(rig.device_page(layer, page), rig.host_page(layer, slot))
    rig.drain(job)


def test_waiting_for_a_layer_leaves_the_interpreter_to_others(native_rig):
    rig = native_rig
    rig.copies.fault = CopyFault(job_delay_us=500_000)
    job = rig.onload([0], [0])
    entered, answers = threading.Event(), []

    def wait() -> None:
        entered.set()
        answers.append(rig.copies.wait_layer(job, 2, time.monotonic() + 60))

    waiter = threading.Thread(target=wait)
    waiter.start()
    entered.wait()
    time.sleep(0.01)  # hand the interpreter to the waiter, which must give it back at once
    assert not answers
    waiter.join()
    assert answers == [True]
    rig.drain(job)


def test_units_are_counted_by_direction(native_rig):
    jobs = [native_rig.onload([1, 2], [1, 2]), native_rig.offload([3, 4, 5, 9], [3, 4, 5, 6])]
    native_rig.drain(*jobs)
    assert native_rig.copies.units_done.tolist() == [3, 4]  # 3 layers, 4 pages


def test_one_poll_returns_any_number_of_ends(native_rig):
    jobs = [native_rig.onload([0], [0]) for _ in range(200)]
    assert native_rig.copies.wait_layer(jobs[-1], 2, time.monotonic() + 60)
    native_rig.copies.close()
    assert [report.job for report in native_rig.copies.poll()] == jobs


def test_deadlines_are_measured_by_the_clock_that_was_given(native_rig):
    clock = FakeClock(50.0)
    copies = NativeCopyEngine(native_rig.pools, native_rig.arena, native_rig.wake, clock)
    copies.fault = CopyFault(job_delay_us=300_000)
    job = native_rig.job(Direction.ONLOAD, [0], [0])
    copies.submit(job)
    assert job.started_s == 50.0
    assert not copies.wait_layer(job, 0, deadline_s=50.0)
    assert copies.wait_layer(job, 0, deadline_s=110.0)
    copies.close()


def test_an_engine_that_is_dropped_stops_its_threads_before_its_memory_goes(native_rig):
    gc.collect()
    before = _num_threads()
    copies = NativeCopyEngine(native_rig.pools, native_rig.arena, native_rig.wake)
    copies.fault = CopyFault(job_delay_us=50_000)
    copies.submit(native_rig.job(Direction.ONLOAD, [0], [0]))
    assert _num_threads() == before + 2
    del copies
    gc.collect()
    assert _num_threads() == before


def test_a_process_ends_cleanly_with_a_copy_under_way():
    script = """
import numpy as np
from engine.platforms.cpu import HostArena, KvPools, Wake
from engine.transfer.fault import CopyFault
from engine.transfer.jobs import CopyJob, Direction
from engine.transfer.native import NativeCopyEngine

class Spec:
    dtype, num_layers, num_kv_heads, qk_dim, v_dim, bytes_per_token_layer = "float32", 1, 1, 1, 1, 8

pools = KvPools(Spec, 1, 1, 1, False)
arena = HostArena(num_chunks=1, num_layers=1, pages_per_chunk=1, page_bytes=8)
copies = NativeCopyEngine(pools, arena, Wake())
copies.fault = CopyFault(job_delay_us=100_000)
ids = np.zeros(1, dtype=np.int32)
copies.submit(CopyJob(direction=Direction.OFFLOAD, first_page=0, pages=ids, host_slots=ids,
                      owner=None, branch=0))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_native_code_checks_ids_by_itself(native_rig):
    wrong = torch.tensor([12], dtype=torch.int32)
    right = torch.tensor([0], dtype=torch.int32)
    worker = native_rig.copies._worker
    with pytest.raises(RuntimeError, match=r"pages\[0\] is 12, but only \[0, 12\) exist"):
        torch.ops.engine.copy_submit(worker, 0, wrong, right, 0, 0, -1)
    with pytest.raises(RuntimeError, match=r"host_slots\[0\] is 12, but only \[0, 12\) exist"):
        torch.ops.engine.copy_submit(worker, 0, right, wrong, 0, 0, -1)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.ops.engine.copy_submit(worker, 0, right.long(), right, 0, 0, -1)
    with pytest.raises(RuntimeError, match="direction"):
        torch.ops.engine.copy_submit(worker, 2, right, right, 0, 0, -1)
    with pytest.raises(RuntimeError, match="no copy worker has the number 999999"):
        torch.ops.engine.copy_close(999999)


def test_submission_after_close_is_an_error(native_rig):
    native_rig.copies.close()
    with pytest.raises(RuntimeError, match="after close"):
        native_rig.onload([0], [0])


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))
