"""Delta requests: served from the user's state, or ended with 409 and nothing touched."""

import msgspec
import numpy as np
import pytest
from core_harness import CoreUnderTest, events
from engine_models import CONFIGS

from engine.models.config import ContextFeature
from engine.models.hstu.model import HstuModel
from engine.testing.models import random_tensors
from engine.types import Usage


def known(core, user="ann", length=18, **options):
    """The usage of an answer on `length` events: where a delta may start."""
    return core.serve(core.rank(user, length, **options)).usage


def refused(core, request_id, code="history_needed"):
    core.settle()
    return core.error(request_id).code == code


def changed_model(name, *, catalogue=None, **inputs):
    config = CONFIGS[name]
    config = msgspec.structs.replace(
        config,
        inputs=msgspec.structs.replace(config.inputs, **inputs),
        catalogue=msgspec.structs.replace(config.catalogue, **(catalogue or {})),
    )
    return HstuModel(config, random_tensors(config))


def test_delta_runs_the_new_rows_on_the_state():
    core = CoreUnderTest()
    base = known(core)
    assert base.base_length == 16
    request_id = core.delta("ann", 23, base)
    usage = core.serve(request_id).usage
    assert core.hits(request_id) == (18, 0, 5)
    assert (usage.history_length, usage.base_length) == (23, 20)
    assert core.lengths("ann") == (23, 20)
    assert len(core.requests[request_id].history["item"]) == 7
    again = core.delta("ann", 24, usage)
    core.settle()
    assert core.hits(again) == (23, 0, 1)
    core.assert_everything_comes_back()


def test_delta_of_events_that_are_all_known_computes_nothing():
    core = CoreUnderTest()
    base = known(core)
    request_id = core.delta("ann", 18, base)
    core.settle()
    assert core.hits(request_id) == (18, 0, 0)


def test_state_that_went_on_from_the_base_differently_is_cut_there():
    core = CoreUnderTest()
    base = known(core)
    history = events(18, salt=sum(map(ord, "ann")))
    request_id = core.delta("ann", [*history[:16], 1, 2, 3], base)
    core.settle()
    assert core.hits(request_id) == (16, 0, 3)
    assert core.value("invalidations_total", "diverged") == 1


def test_delta_shorter_than_the_state_runs_in_private_pages():
    core = CoreUnderTest()
    base = known(core)
    known(core, length=30)
    request_id = core.delta("ann", 22, base)
    core.settle()
    assert core.hits(request_id) == (20, 0, 2)
    assert core.lengths("ann") == (30, 28)


def test_delta_in_many_pieces_is_one_answer():
    core = CoreUnderTest(max_batch_tokens=8)
    base = known(core)
    core.runner.steps.clear()
    request_id = core.delta("ann", 40, base, candidates=9)
    core.settle()
    assert core.hits(request_id) == (18, 0, 22)
    assert len(core.runner.steps) > 3
    assert all(work.start >= 18 for step in core.runner.steps for work in step.works)


def test_delta_is_loaded_from_the_host():
    core = CoreUnderTest(pages=12)
    base = known(core)
    core.evict_device()
    request_id = core.delta("ann", 20, base)
    core.settle()
    assert core.hits(request_id) == (0, 16, 4)


def test_prefetch_and_retrieve_may_be_deltas():
    core = CoreUnderTest()
    base = known(core)
    options = {"base_length": 16, "base_fingerprint": base.fingerprint}
    history = events(22, salt=sum(map(ord, "ann")))
    prefetched = core.prefetch("ann", history[16:], **options)
    core.settle()
    assert core.hits(prefetched) == (18, 0, 4)
    found = core.retrieve("ann", history[16:], **options)
    core.settle()
    assert core.hits(found) == (22, 0, 0)
    whole = core.retrieve("ann", history)
    core.settle()
    got, want = core.response(found), core.response(whole)
    np.testing.assert_array_equal(got.item_scores, want.item_scores)


def test_unknown_user_needs_the_history():
    core = CoreUnderTest()
    base = known(core)
    request_id = core.delta("bob", 23, base)
    assert refused(core, request_id)
    assert "this user does not begin with the 16 tokens of base_length 16" in (
        core.error(request_id).message
    )
    assert core.lengths("bob") is None
    core.assert_everything_comes_back()


def test_wrong_base_leaves_the_users_state_alone():
    core = CoreUnderTest()
    known(core)
    of_another = known(core, "bob")
    before = core.core.user("", "ann")
    request_id = core.delta("ann", 23, of_another)
    assert refused(core, request_id)
    assert core.core.user("", "ann") == before
    assert core.value("invalidations_total", "diverged") == 0
    again = core.rank("ann", 20)
    core.settle()
    assert core.hits(again) == (18, 0, 2)


@pytest.mark.parametrize(("length", "pages"), [(16, 5), (8, 3)])
def test_fingerprint_of_another_length_is_no_base(length, pages):
    core = CoreUnderTest()
    shown = known(core, length=4 * pages + 1)
    request_id = core.delta("ann", 23, msgspec.structs.replace(shown, base_length=length))
    assert refused(core, request_id)
    assert core.lengths("ann") == (4 * pages + 1, 4 * pages)


def test_base_that_is_no_page_boundary_needs_the_history():
    core = CoreUnderTest()
    base = msgspec.structs.replace(known(core), base_length=15)
    request_id = core.delta("ann", 23, base)
    assert refused(core, request_id)
    assert "no boundary of pages of 4" in core.error(request_id).message


def test_evicted_base_needs_the_history():
    core = CoreUnderTest(pages=12, tiers="device")
    base = known(core)
    core.evict_device()
    request_id = core.delta("ann", 23, base)
    assert refused(core, request_id)
    core.assert_everything_comes_back()


def test_base_evicted_between_two_pieces_needs_the_history():
    core = CoreUnderTest(pages=8, tiers="device", max_batch_tokens=12, max_piece_tokens=12)
    base = known(core)
    core.runner.steps.clear()
    ann = core.delta("ann", 26, base, candidates=9)
    core.steps()
    bob = core.rank("bob", 20, priority=-9)
    core.turn()
    assert core.lengths("ann") == (20, 0), "bob's first piece took two pages"
    assert refused(core, ann)
    assert core.hits(bob) == (0, 0, 20)
    assert core.pieces == [[(18, 26, 4)], [(0, 12, 0)], [(12, 20, 3)]]
    core.assert_everything_comes_back()


def test_forgotten_user_needs_the_history():
    core = CoreUnderTest()
    base = known(core)
    core.rank("zed", 4)
    core.steps()
    waiting = core.delta("ann", 23, base)
    core.forget("ann")
    assert refused(core, waiting)
    assert core.core.usage().num_users == 1, "zed's"
    core.assert_everything_comes_back()


def test_user_forgotten_between_two_pieces_needs_the_history():
    core = CoreUnderTest(max_batch_tokens=8)
    base = known(core)
    request_id = core.delta("ann", 40, base)
    core.steps()
    core.forget("ann")
    assert refused(core, request_id)
    core.assert_everything_comes_back()


def test_user_forgotten_during_the_last_piece_is_answered():
    core = CoreUnderTest()
    base = known(core)
    request_id = core.delta("ann", 23, base)
    core.steps()
    core.forget("ann")
    core.settle()
    assert core.hits(request_id) == (18, 0, 5)
    assert core.lengths("ann") is None


def test_failed_onload_below_the_base_needs_the_history():
    core = CoreUnderTest(pages=12)
    base = known(core)
    core.evict_device()
    core.copies.is_automatic = False
    request_id = core.delta("ann", 23, base)
    core.steps()
    (onload,) = core.copies.onloads
    core.copies.fail(onload)
    assert refused(core, request_id)
    assert core.value("copy_failures_total") == 1
    core.assert_everything_comes_back()


def test_failed_onload_above_the_base_is_recomputed():
    core = CoreUnderTest(pages=12)
    base = known(core)
    known(core, length=22)
    core.evict_device()
    core.serve(core.prefetch("ann", 16))
    assert core.lengths("ann") == (16, 20)
    core.copies.is_automatic = False
    request_id = core.delta("ann", 23, base)
    core.steps()
    (onload,) = core.copies.onloads
    assert onload.first_page == 4
    core.copies.fail(onload)
    core.settle()
    assert core.hits(request_id) == (16, 0, 7)


def test_other_context_is_refused_and_harms_nothing():
    model = changed_model("append", context=(ContextFeature(name="segment", num_rows=4),))
    core = CoreUnderTest(model)
    base = known(core, length=19, context=[1])
    assert base.base_length == 15
    wrong = core.delta("ann", 23, base, context=[2])
    assert refused(core, wrong)
    assert "another context or of other weights" in core.error(wrong).message
    assert core.lengths("ann") == (20, 20)
    right = core.delta("ann", 23, base, context=[1])
    core.settle()
    assert core.hits(right) == (20, 0, 4)


def test_other_weights_are_refused():
    core, newer = CoreUnderTest(), msgspec.structs.replace(CONFIGS["append"], weights_version="2")
    base = known(core)
    other = CoreUnderTest(HstuModel(newer, random_tensors(newer)))
    known(other)
    request_id = other.delta("ann", 23, base)
    assert refused(other, request_id)
    assert "other weights" in other.error(request_id).message


def test_history_that_moves_on_by_a_stride_needs_the_history():
    model = changed_model("stride", max_history_events=20, num_positions=21)
    core = CoreUnderTest(model)
    base = known(core, length=19)
    assert base.base_length == 16
    within = core.delta("ann", 20, base)
    core.settle()
    assert core.hits(within) == (19, 0, 1)
    beyond = core.delta("ann", 21, base)
    assert refused(core, beyond)
    whole = core.serve(core.rank("ann", 21)).usage
    assert (whole.history_length, whole.base_length) == (13, 20)
    after = core.delta("ann", 22, whole)
    core.settle()
    assert core.hits(after) == (13, 0, 1)


def test_base_older_than_the_model_reads_needs_the_history():
    model = changed_model("stride", max_history_events=20, num_positions=21)
    core = CoreUnderTest(model)
    base = known(core, length=9)
    request_id = core.delta("ann", 40, base)
    assert refused(core, request_id)
    assert "begins at event 24" in core.error(request_id).message


def test_history_start_counts_from_the_first_event_ever():
    core = CoreUnderTest("stride")
    base = known(core, length=11, history_start=16)
    assert base.base_length == 24
    request_id = core.delta("ann", 14, base, history_start=16)
    core.settle()
    assert core.hits(request_id) == (11, 0, 3)
    assert core.response(request_id).usage.base_length == 28
    other = core.delta("ann", 22, base, history_start=8)
    assert refused(core, other)


def test_interleaved_delta_closes_the_open_event():
    core = CoreUnderTest("interleaved", page_size=3)
    items, actions = np.arange(9) * 10 + 1, np.arange(9) % 6
    first = core.rank("ann", {"item": items[:6], "action": actions[:5]}, 2, context=[1])
    core.settle()
    usage = core.response(first).usage
    assert (usage.history_length, usage.base_length) == (12, 4)
    options = {"base_length": 4, "base_fingerprint": usage.fingerprint, "context": [1]}
    closed = core.rank("bob", {"item": items, "action": actions}, 2, context=[1])
    core.settle()
    want = core.response(closed).scores
    request_id = core._submit(
        core.requests[first].task,
        "ann",
        {"item": items[4:], "action": actions[4:]},
        candidates={"item": np.array([1, 11])},
        **options,
    )
    core.wholes[request_id] = core.requests[closed]
    core.settle()
    assert core.hits(request_id) == (12, 0, 7)
    np.testing.assert_array_equal(core.response(request_id).scores, want)


def test_base_lies_before_the_first_unknown_event():
    core = CoreUnderTest()
    history = events(18)
    history[10] = 99  # dropped
    base = core.serve(core.rank("ann", history)).usage
    assert (base.history_length, base.base_length) == (17, 8)
    request_id = core.delta("ann", [*history, 1, 2], base)
    core.settle()
    assert core.hits(request_id) == (17, 0, 2)
    assert core.response(request_id).usage.base_length == 8, "again before the unknown event"
    assert core.response(request_id).usage.fingerprint == base.fingerprint


def test_base_lies_before_the_first_event_taken_as_unk():
    core = CoreUnderTest(changed_model("append", catalogue={"unknown_history": "unk"}))
    history = events(18)
    history[10] = 99
    base = core.serve(core.rank("ann", history)).usage
    assert (base.history_length, base.base_length) == (18, 8)


def test_delta_of_unknown_items_alone_ranks_and_gives_its_base_back():
    core = CoreUnderTest()
    history = events(17)
    base = core.serve(core.rank("ann", history)).usage
    request_id = core.delta("ann", [*history[:16], 99], base)
    core.settle()
    assert core.hits(request_id) == (16, 0, 0)
    assert core.response(request_id).usage.base_length == 16
    assert core.response(request_id).usage.fingerprint == base.fingerprint
    needs_row = core.retrieve("ann", [99], base_length=16, base_fingerprint=base.fingerprint)
    assert refused(core, needs_row)
    assert "no event of this delta request is known" in core.error(needs_row).message


def test_history_that_outgrew_the_pool_needs_the_history():
    core = CoreUnderTest(pages=6)
    base = known(core)
    request_id = core.delta("ann", 40, base)
    assert refused(core, request_id)
    assert "device_pages=6" in core.error(request_id).message
    whole = core.serve(core.rank("ann", 40)).usage
    assert (whole.base_length, whole.fingerprint) == (0, "")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cache": "bypass"}, "cache is bypass"),
        ({"cache": "refresh"}, "cache is refresh"),
        ({"base_fingerprint": "zz"}, "base_fingerprint is 'zz'"),
    ],
)
def test_delta_that_cannot_be_is_an_invalid_request(options, named):
    core = CoreUnderTest()
    base = known(core)
    options = {"base_length": 16, "base_fingerprint": base.fingerprint, **options}
    request_id = core.rank("ann", events(2), **options)
    assert core.error(request_id).code == "invalid_request"
    assert named in core.error(request_id).message
    assert core.lengths("ann") == (18, 16)


def test_delta_that_excludes_the_history_is_an_invalid_request():
    core = CoreUnderTest()
    base = known(core)
    options = {"base_length": 16, "base_fingerprint": base.fingerprint}
    request_id = core.retrieve("ann", events(2), exclude_history=True, **options)
    assert "exclude_history needs the whole history" in core.error(request_id).message


def test_prefetch_delta_without_events_is_an_invalid_request():
    core = CoreUnderTest()
    base = known(core)
    for history in (None, []):
        request_id = core.prefetch(
            "ann", history, base_length=16, base_fingerprint=base.fingerprint
        )
        assert core.error(request_id).code == "invalid_request"
        assert "send" in core.error(request_id).message


def test_base_without_its_fingerprint_is_an_invalid_request():
    core = CoreUnderTest()
    request = core.requests[core.rank("ann", 5)]
    for number, changes in enumerate(
        ({"base_length": 4}, {"base_fingerprint": "0" * 32}, {"base_length": -4})
    ):
        request_id = f"wrong-{number}"
        wrong = msgspec.structs.replace(request, request_id=request_id, **changes)
        core.core.submit(wrong)
        core.requests[request_id] = wrong
        core.collect()
        assert core.error(request_id).code == "invalid_request"
        assert "gives both" in core.error(request_id).message


def test_engine_without_a_cache_serves_no_deltas():
    core = CoreUnderTest(tiers="off")
    base = known(core)
    assert (base.base_length, base.fingerprint) == (0, "")
    shown = Usage(base_length=4, fingerprint="0" * 32)
    assert refused(core, core.delta("ann", 23, shown), "invalid_request")


@pytest.mark.parametrize("name", ["exact", "research"])
def test_model_whose_rows_need_more_serves_no_deltas_and_hands_out_no_base(name):
    core = CoreUnderTest(name)
    options = {"context": [1]} if name == "exact" else {"query_time": 1000}
    history = {"item": np.arange(18) * 10 + 1}
    if name == "research":
        history["time"] = np.arange(18) + 100
    usage = core.serve(core.rank("ann", history, **options)).usage
    assert (usage.base_length, usage.fingerprint) == (0, "")
    request_id = core.rank("ann", history, base_length=4, base_fingerprint="0" * 32, **options)
    assert core.error(request_id).code == "invalid_request"
    assert "send" in core.error(request_id).message


def test_refused_delta_lets_the_users_next_request_go():
    core = CoreUnderTest()
    base = known(core)
    wrong = core.delta("bob", 20, base)
    right = core.rank("bob", 20)
    core.settle()
    assert core.outcome_order[-2:] == [wrong, right]
    assert core.value("requests_total", "rank", "history_needed") == 1
