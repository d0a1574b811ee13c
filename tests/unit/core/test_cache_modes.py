"""How a request meets the state: use, bypass, refresh, off; and what the answer says about it."""

import msgspec
import numpy as np
import pytest
from core_harness import CoreUnderTest, events, tiny_model
from engine_models import CONFIGS

from engine.block_manager.fingerprint import HashChain
from engine.models.hstu.model import HstuModel
from engine.testing.models import random_tensors


def test_bypass_neither_reads_nor_writes_nor_touches():
    core = CoreUnderTest(pages=8)
    core.warm("ann", 16)
    core.warm("bob", 12)
    core.runner.steps.clear()
    request_id = core.rank("ann", 20, cache="bypass")
    core.settle()
    assert core.pieces == [[(0, 20, 3)]] and core.runner.steps[0].scratch
    assert core.hits(request_id) == (0, 0, 20)
    assert core.response(request_id).usage.reuse == "bypass"
    assert core.response(request_id).usage.fingerprint == ""
    assert core.lengths("ann") == (16, 16)
    assert core.value("scratch_runs_total", "bypass") == 1
    core.rank("cid", 8)
    core.settle()
    assert core.lengths("ann") == (12, 16), "ann is still the least recently used"
    assert core.lengths("bob") == (12, 12)


def test_scratch_run_goes_alone():
    core = CoreUnderTest()
    core.rank("ann", 8)
    core.rank("bob", 8, cache="bypass")
    core.rank("cid", 8)
    core.settle()
    assert core.pieces == [[(0, 8, 3), (0, 8, 3)], [(0, 8, 3)]]
    assert [step.scratch for step in core.runner.steps] == [False, True]


def test_scratch_run_in_front_closes_its_step():
    core = CoreUnderTest()
    core.rank("bob", 8, cache="bypass")
    core.rank("ann", 8)
    core.rank("cid", 8)
    core.settle()
    assert [step.scratch for step in core.runner.steps] == [True, False]


def test_scratch_run_is_not_cut_by_the_batch_budget():
    core = CoreUnderTest(max_batch_tokens=16)
    core.rank("ann", 40, candidates=30, cache="bypass")
    core.settle()
    assert core.pieces == [[(0, 40, 30)]]


def test_refresh_recomputes_and_replaces_the_state():
    core = CoreUnderTest()
    core.warm("ann", 16)
    request_id = core.rank("ann", 16, cache="refresh")
    core.settle()
    assert core.hits(request_id) == (0, 0, 16)
    assert core.response(request_id).usage.reuse == "append"
    assert core.lengths("ann") == (16, 16)
    assert core.value("invalidations_total", "refreshed") == 1
    again = core.rank("ann", 16)
    core.settle()
    assert core.hits(again) == (16, 0, 0)


def test_refresh_in_pieces_invalidates_once():
    core = CoreUnderTest(max_batch_tokens=16)
    core.warm("ann", 16)
    request_id = core.rank("ann", 40, cache="refresh")
    core.settle()
    assert core.hits(request_id) == (0, 0, 40)
    assert core.value("invalidations_total", "refreshed") == 1


def test_cache_off_keeps_nothing():
    core = CoreUnderTest(tiers="off", max_batch_tokens=16)
    first = core.rank("ann", 40, candidates=20)
    core.settle()
    assert core.hits(first) == (0, 0, 40)
    assert core.response(first).usage.reuse == "bypass"
    assert core.core.usage().pages_used == 0
    second = core.rank("ann", 40)
    core.settle()
    assert core.hits(second) == (0, 0, 40)
    assert core.copies.submitted == []


def test_device_tier_alone_never_copies():
    core = CoreUnderTest(tiers="device", pages=12)
    core.warm("ann", 16)
    assert core.lengths("ann") == (16, 0)
    core.evict_device()
    assert core.lengths("ann") is None
    assert core.copies.submitted == []
    assert core.value("dropped_tokens_total") == 16


def test_tokens_by_tier_add_up_to_the_history():
    core = CoreUnderTest(pages=12)
    core.warm("ann", 16)
    core.rank("bob", 40)
    core.settle()
    assert core.lengths("ann") == (8, 16)
    request_id = core.rank("ann", 19)
    core.settle()
    assert core.hits(request_id) == (8, 8, 3)
    usage = core.response(request_id).usage
    assert (usage.history_length, usage.suffix_tokens) == (19, 3)
    assert usage.weights_version == "1"


def test_times_of_the_answer_are_those_of_its_steps():
    core = CoreUnderTest(max_batch_tokens=16)
    core.rank("zed", 4)
    core.steps()
    core.runner.onload_wait_s = 0.002
    request_id = core.rank("ann", 29)
    core.clock.advance(0.5)
    core.settle()
    usage = core.response(request_id).usage
    # The core looked half a second later; then two steps of 10 ms, 2 ms of each waiting.
    assert (usage.queue_us, usage.run_us, usage.onload_wait_us) == (500_000, 20_000, 4_000)


@pytest.mark.parametrize(
    ("length", "base"), [(0, 0), (1, 0), (4, 0), (5, 4), (16, 12), (17, 16), (18, 16)]
)
def test_delta_may_start_at_the_last_page_boundary_before_the_last_event(length, base):
    core = CoreUnderTest()
    history = events(length)
    request_id = core.rank("ann", history)
    core.settle()
    usage = core.response(request_id).usage
    assert usage.base_length == base
    expected = ""
    if base:
        prefix = tiny_model("append").prepare(core.requests[core.rank("ann", history[:base])])
        chain = HashChain.from_records(prefix.records, prefix.seed, base)
        assert chain.length == base
        pages = HashChain.from_records(prefix.records, prefix.seed, 4)
        expected = f"{pages.at(0):016x}{pages.at(base):016x}"
    assert usage.fingerprint == expected


def test_delta_starts_only_between_events():
    # 1 contextual row and 2 rows an event: of the boundaries 3, 6, 9 only 3 and 9 lie between two.
    core = CoreUnderTest("interleaved", page_size=3)
    bases = []
    for count in (1, 2, 4, 5, 6):
        history = {"item": np.arange(count) * 10 + 1, "action": np.zeros(count, np.int64)}
        request_id = core.rank("ann", history, candidates=2, context=[1])
        core.settle()
        bases.append(core.response(request_id).usage.base_length)
    assert bases == [0, 1, 1, 4, 4]


def test_delta_base_counts_events_from_the_first_one_ever():
    core = CoreUnderTest("stride")
    request_id = core.rank("ann", 11, history_start=16)
    core.settle()
    assert core.response(request_id).usage.base_length == 24


def test_exact_reuse_is_all_or_nothing():
    core = CoreUnderTest("exact")
    core.warm("ann", 12, context=[1])
    same = core.rank("ann", 12, context=[1])
    core.settle()
    assert core.hits(same) == (13, 0, 0)
    assert core.response(same).usage.reuse == "exact"
    longer = core.rank("ann", 13, context=[1])
    core.settle()
    assert core.hits(longer) == (0, 0, 14)
    other_profile = core.rank("ann", 13, context=[2])
    core.settle()
    assert core.hits(other_profile) == (0, 0, 14)


def test_history_that_depends_on_the_query_time_runs_as_scratch():
    config = CONFIGS["append"]
    inputs = msgspec.structs.replace(
        config.inputs, positions="from_newest", num_positions=64, num_time_buckets=8
    )
    config = msgspec.structs.replace(config, inputs=inputs)
    model = HstuModel(config, random_tensors(config))
    core = CoreUnderTest(model)
    history = {"item": np.arange(8) * 10 + 1, "time": np.arange(8) + 100}
    for _ in range(2):
        request_id = core.rank("ann", history, query_time=1000)
        core.settle()
        assert core.hits(request_id) == (0, 0, 8)
        assert core.response(request_id).usage.reuse == "request"
    assert core.lengths("ann") is None
    assert core.value("scratch_runs_total", "query_time") == 2
    refused = core.prefetch("ann", history, query_time=1000)
    assert core.error(refused).code == "invalid_request"
