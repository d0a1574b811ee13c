"""What the counters count. A step takes 10 ms; a page has 4 tokens and 100 bytes."""

import pytest
from core_harness import CoreUnderTest

from engine.metrics import METRICS


def test_answered_requests_count_their_tokens_by_tier():
    core = CoreUnderTest(pages=12)
    core.warm("ann", 16)
    core.rank("bob", 40)
    core.settle()
    core.rank("ann", 19)
    core.settle()
    # ann 16, bob 40, ann 19 of which 8 on the device and 8 on the host.
    assert core.value("history_tokens_total") == 75
    assert core.value("hit_tokens_total", "device") == 8
    assert core.value("hit_tokens_total", "host") == 8
    assert core.value("computed_tokens_total") == 59
    assert core.value("suffix_tokens_total") == 6
    assert core.value("requests_total", "rank", "ok") == 2
    assert core.value("requests_total", "prefetch", "ok") == 1


def test_every_outcome_is_counted_by_task_and_code():
    core = CoreUnderTest(max_queue_requests=2, look_ahead=False)
    running = core.rank("ann", 8)
    core.steps()
    expired = core.retrieve("bob", 8, deadline_ms=1)
    core.rank("cid", 8, query_time=5)
    core.rank("cid", 8)
    core.rank("dot", 8)
    core.cancel(running)
    core.clock.advance(0.01)
    core.settle()
    assert core.error(expired).code == "deadline_exceeded"
    counted = {
        sample.labels: sample.value
        for sample in core.core.stats().samples
        if sample.name == "requests_total"
    }
    assert counted == {
        ("rank", "invalid_request"): 1,
        ("rank", "overloaded"): 1,
        ("rank", "cancelled"): 1,
        ("retrieve", "deadline_exceeded"): 1,
        ("rank", "ok"): 1,
    }


def test_evicted_and_dropped_tokens_are_counted():
    core = CoreUnderTest(pages=8, chunks=1)
    core.warm("ann", 20)
    assert core.lengths("ann") == (20, 8), "one chunk holds 8 tokens"
    assert core.value("offload_skipped_total") == 1
    core.warm("bob", 32)
    assert core.value("evicted_pages_total", "device", "space") == 5
    assert core.value("dropped_tokens_total") == 12
    assert core.value("evicted_pages_total", "host", "space") == 2, "bob took ann's chunk"
    assert core.lengths("ann") is None


def test_bytes_of_copies_are_counted_by_direction():
    core = CoreUnderTest(pages=12)
    core.warm("ann", 18)
    assert core.value("copy_bytes_total", "offload") == 400
    core.evict_device()
    core.rank("ann", 18)
    core.settle()
    assert core.value("copy_bytes_total", "onload") == 400


def host_only(**options):
    core = CoreUnderTest(pages=12, **options)
    core.warm("ann", 16)
    core.warm("bob", 16)
    core.evict_device()
    core.copies.is_automatic = False
    return core


def test_onload_behind_another_step_is_hidden():
    core = host_only()
    core.rank("zed", 4)
    core.steps()
    core.rank("ann", 16)
    core.steps()
    core.clock.advance(0.25)
    core.copies.finish(core.copies.onloads[0])
    core.steps()
    core.turn()
    core.turn()
    assert core.value("onload_seconds_total") == pytest.approx(0.25)
    assert core.value("onload_hidden_seconds_total") == pytest.approx(0.25)


def test_onload_that_was_waited_for_is_not_hidden():
    core = host_only()
    core.rank("ann", 16)
    core.steps()
    core.clock.advance(0.25)
    core.copies.finish(core.copies.onloads[0])
    core.runner.onload_wait_s = 0.125
    core.turn()
    # It was found to have ended after the step: 250 ms until then and 10 ms of step.
    assert core.value("onload_seconds_total") == pytest.approx(0.26)
    assert core.value("onload_hidden_seconds_total") == pytest.approx(0.135)
    assert core.value("onload_wait_seconds") == pytest.approx(0.125)


def test_onloads_of_one_step_count_from_the_first_start_to_the_last_end():
    core = host_only()
    core.rank("zed", 4)
    core.steps()
    core.rank("ann", 16)
    core.steps()
    core.clock.advance(0.25)
    core.rank("bob", 16)
    core.steps()
    ann, bob = core.copies.onloads
    core.copies.finish(ann)
    core.steps()
    core.clock.advance(0.5)
    core.copies.finish(bob)
    core.steps()
    core.turn()
    core.turn()
    assert core.value("onload_seconds_total") == pytest.approx(0.75)


def test_moves_are_hidden_onloads():
    core = host_only()
    core.prefetch("ann", 16)
    core.steps()
    core.clock.advance(0.5)
    core.copies.finish(core.copies.onloads[0])
    core.steps()
    assert core.value("onload_seconds_total") == pytest.approx(0.5)
    assert core.value("onload_hidden_seconds_total") == pytest.approx(0.5)


def test_prefetched_bytes_that_nobody_used_are_counted_as_waste():
    core = host_only()
    core.prefetch("ann")
    core.steps()
    core.copies.finish(core.copies.onloads[0])
    core.steps()
    core.copies.is_automatic = True
    assert core.value("prefetch_wasted_bytes_total") == 0
    core.evict_device()
    assert core.value("prefetch_wasted_bytes_total") == 400


def test_prefetched_bytes_that_were_used_are_no_waste():
    core = host_only()
    core.copies.is_automatic = True
    core.prefetch("ann")
    core.settle()
    core.rank("ann", 16)
    core.settle()
    core.evict_device()
    assert core.value("prefetch_wasted_bytes_total") == 0


def test_steps_are_observed():
    core = CoreUnderTest()
    core.rank("ann", 8)
    core.rank("bob", 4)
    core.settle()
    core.rank("ann", 8, cache="bypass")
    core.settle()
    assert core.value("step_tokens") == 11 + 7 + 11
    assert core.value("step_requests") == 3
    assert core.value("step_seconds") == pytest.approx(0.02)
    counts = {
        sample.name: sum(sample.bucket_counts)
        for sample in core.core.stats().samples
        if METRICS[sample.name].kind == "histogram"
    }
    assert counts == {
        "queue_seconds": 3,
        "onload_wait_seconds": 2,
        "step_seconds": 2,
        "request_seconds": 3,
        "step_tokens": 2,
        "step_requests": 2,
    }


def test_request_seconds_are_from_admission_to_answer():
    core = CoreUnderTest(look_ahead=False)
    core.rank("ann", 8)
    core.steps()
    core.rank("bob", 8)
    core.settle()
    assert core.value("queue_seconds") == pytest.approx(0.01, abs=2e-6), "whole microseconds"
    assert core.value("request_seconds") == pytest.approx(0.01 + 0.02)


def test_gauges_show_the_moment():
    core = CoreUnderTest(pages=12, chunks=6, max_batch_requests=1, automatic_copies=False)
    core.rank("ann", 8)
    core.steps()
    core.turn()
    for user in ("bob", "cid", "dot"):
        core.rank(user, 4)
    core.steps()
    stats = core.core.stats()
    gauges = {
        (sample.name, *sample.labels): sample.value
        for sample in stats.samples
        if METRICS[sample.name].kind == "gauge"
    }
    assert gauges == {
        ("requests_waiting",): 1,
        ("requests_running",): 2,
        ("device_pages_used",): 4,
        ("device_pages_total",): 12,
        ("host_chunks_used",): 1,
        ("host_chunks_total",): 6,
        ("users_resident", "device"): 3,
        ("users_resident", "host"): 3,
        ("copies_in_flight", "onload"): 0,
        ("copies_in_flight", "offload"): 1,
        ("weights_version_info", "1", "active"): 1,
    }
    assert (stats.num_waiting, stats.num_running, stats.num_steps) == (1, 2, 2)
