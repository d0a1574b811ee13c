"""Requests cut into pieces: budgets, order within a user, and runs that go alone."""

import numpy as np
import pytest
from core_harness import CoreUnderTest, recompute


def test_long_history_alone_takes_the_whole_budget():
    core = CoreUnderTest(max_batch_tokens=40, max_piece_tokens=8)
    core.rank("ann", 30)
    core.settle()
    assert core.pieces == [[(0, 30, 3)]]


def test_long_history_is_cut_while_others_wait():
    core = CoreUnderTest(max_batch_tokens=40, max_piece_tokens=8)
    ann = core.rank("ann", 30)
    bob = core.rank("bob", 6)
    core.settle()
    assert core.pieces == [[(0, 8, 0), (0, 6, 3)], [(8, 30, 3)]]
    assert core.outcome_order == [bob, ann]
    assert core.hits(ann) == (0, 0, 30), "what it computed itself is no hit"


def test_piece_is_a_quarter_of_the_batch_by_default():
    core = CoreUnderTest(max_batch_tokens=40)
    core.rank("ann", 30)
    core.rank("bob", 6)
    core.settle()
    assert core.pieces[0] == [(0, 10, 0), (0, 6, 3)]


def test_history_above_the_batch_budget_comes_in_several_steps():
    core = CoreUnderTest(max_batch_tokens=16)
    ann = core.rank("ann", 40)
    core.settle()
    assert core.pieces == [[(0, 16, 0)], [(16, 32, 0)], [(32, 40, 3)]]
    assert core.hits(ann) == (0, 0, 40)


def test_candidates_of_several_pieces_keep_their_order():
    core = CoreUnderTest(max_batch_tokens=16)
    candidates = [5, 3, 9, 3, 1] * 8
    ann = core.rank("ann", 10, candidates)
    core.settle()
    assert core.pieces == [[(0, 10, 6)], [(10, 10, 16)], [(10, 10, 16)], [(10, 10, 2)]]
    response = core.response(ann)
    assert response.scores.shape == (40, 2)
    np.testing.assert_array_equal(response.scores[1], response.scores[3], "candidate 3 twice")
    assert response.usage.suffix_tokens == 40


def test_best_candidates_of_several_pieces_are_chosen_among_all():
    core = CoreUnderTest(max_batch_tokens=16)
    ann = core.rank("ann", 10, list(range(40)), top_k=2)
    core.settle()
    expected = recompute(core.model.prepare(core.requests[ann]))[:, 0]
    best = sorted(range(40), key=lambda candidate: -expected[candidate])[:2]
    assert core.response(ann).items.tolist() == [10 * candidate + 1 for candidate in best]
    assert core.response(ann).item_scores.tolist() == [expected[candidate] for candidate in best]


def test_whole_chains_are_cut_with_target_groups():
    core = CoreUnderTest("interleaved", max_batch_tokens=16)
    candidates = list(range(20))
    ann = core.rank("ann", _item_action(4), candidates, context=[2])
    core.settle()
    # 1 contextual row + 2 rows an event; groups of 2 candidates.
    assert core.pieces == [[(0, 9, 6)], [(9, 9, 14)]]
    assert core.response(ann).scores.shape == (20, 2)


def _item_action(count):
    return {"item": np.arange(count) * 10 + 1, "action": np.arange(count) % 6}


def test_provisional_row_comes_with_every_suffix_piece():
    core = CoreUnderTest("research", max_batch_tokens=16)
    history = {"item": np.arange(5) * 10 + 1, "time": np.arange(5) + 100}
    ann = core.rank("ann", history, list(range(30)), query_time=1000)
    core.settle()
    # 5 events: 4 committed rows, the fifth runs with each suffix piece.
    assert core.pieces == [[(0, 4, 12)], [(4, 4, 16)], [(4, 4, 5)]]
    assert core.response(ann).scores.shape == (30, 2)
    assert core.response(ann).usage.history_length == 4


def test_batch_holds_no_more_requests_than_its_budget():
    core = CoreUnderTest(max_batch_requests=2)
    for user in "abcde":
        core.rank(user, 4)
    core.settle()
    assert [len(step) for step in core.pieces] == [2, 2, 1]


def test_batch_holds_no_more_tokens_than_its_budget():
    core = CoreUnderTest(max_batch_tokens=20, max_piece_tokens=20)
    for user in "abc":
        core.rank(user, 6)
    core.settle()
    # 9 rows each: the third request brings only the 2 history rows that fit.
    assert core.pieces == [[(0, 6, 3), (0, 6, 3), (0, 2, 0)], [(2, 6, 3)]]


def test_batch_holds_no_more_predicted_time_than_its_budget():
    core = CoreUnderTest(max_step_ms=25.0)
    core.rank("ann", 4)
    core.settle()
    # 10 ms for 7 rows were measured: two such requests take 20 ms, three 30 ms.
    for user in "bcde":
        core.rank(user, 4)
    core.settle()
    assert [len(step) for step in core.pieces] == [1, 2, 2]


def test_single_piece_runs_whatever_its_predicted_time():
    core = CoreUnderTest(max_step_ms=0.001)
    core.rank("ann", 4)
    core.settle()
    core.rank("bob", 40)
    core.rank("cid", 4)
    core.settle()
    assert [len(step) for step in core.pieces] == [1, 1, 1]


def test_step_onloads_no_more_bytes_than_its_budget():
    core = CoreUnderTest(pages=12, max_onload_bytes=1)
    for user in "abc":
        core.warm(user, 16)
    core.evict_device()
    bytes_of_16_tokens = 16 * core.model.spec.bytes_per_token_layer * 2
    core = CoreUnderTest(pages=12, max_onload_bytes=2 * bytes_of_16_tokens)
    for user in "abc":
        core.warm(user, 16)
    core.evict_device()
    core.runner.steps.clear()
    ids = [core.rank(user, 16) for user in "abc"]
    core.settle()
    assert [len(step) for step in core.pieces] == [2, 1]
    assert [core.hits(request_id) for request_id in ids] == [(0, 16, 0)] * 3


def test_onload_above_its_budget_goes_alone():
    core = CoreUnderTest(pages=12, max_onload_bytes=1)
    for user in "ab":
        core.warm(user, 16)
    core.evict_device()
    core.runner.steps.clear()
    for user in "ab":
        core.rank(user, 16)
    core.settle()
    assert [len(step) for step in core.pieces] == [1, 1]


def test_uncut_history_runs_alone_whatever_the_budgets():
    core = CoreUnderTest("exact", max_batch_tokens=16, max_piece_tokens=8)
    core.rank("ann", 4, context=[1])
    core.rank("bob", 30, context=[1])
    core.rank("cid", 4, context=[1])
    core.settle()
    # One contextual row each; every first piece must meet its whole history.
    assert core.pieces == [[(0, 5, 3)], [(0, 31, 3)], [(0, 5, 3)]]
    assert core.value("uncut_pieces_total") == 3


def test_warm_bidirectional_history_is_batched_again():
    core = CoreUnderTest("exact")
    for user in "ab":
        core.warm(user, 8, context=[1])
    core.runner.steps.clear()
    for user in "ab":
        core.rank(user, 8, context=[1])
    core.settle()
    assert core.pieces == [[(9, 9, 3), (9, 9, 3)]]
    assert core.value("uncut_pieces_total") == 2


def test_uncut_history_takes_many_candidates_along_up_to_its_limit():
    core = CoreUnderTest("exact", max_batch_tokens=16, max_uncut_tokens=40)
    core.rank("ann", 30, list(range(20)), context=[1])
    core.settle()
    assert core.pieces == [[(0, 31, 9)], [(31, 31, 11)]]


def test_same_user_is_served_in_order_one_piece_at_a_time():
    core = CoreUnderTest(max_batch_tokens=16)
    first = core.rank("ann", 24, priority=5)
    second = core.rank("ann", 28, priority=0)
    other = core.rank("bob", 4)
    core.settle()
    assert core.outcome_order == [other, first, second]
    users = [[len(work.prepared.records) for work in step.works] for step in core.runner.steps]
    assert all(len(step) == len(set(step)) for step in users)
    assert core.hits(second) == (24, 0, 4), "the second finds what the first has computed"


def test_second_request_of_a_user_is_not_planned_beside_the_first():
    core = CoreUnderTest()
    core.rank("ann", 8)
    core.steps()
    core.rank("ann", 9)
    core.steps()
    assert core.trace == ["plan 1", "launch 1"]
    assert core.core.stats().num_waiting == 1


def test_users_of_two_namespaces_never_meet():
    core = CoreUnderTest()
    a = core.rank("ann", 8, namespace="a")
    b = core.rank("ann", 8, namespace="b")
    core.settle()
    assert [len(step) for step in core.pieces] == [2], "two users: they share a step"
    assert core.hits(a) == core.hits(b) == (0, 0, 8)
    core.forget("ann", "a")
    core.settle()
    assert core.lengths("ann", "a") is None
    assert core.lengths("ann", "b") == (8, 8)


def test_shorter_history_is_served_from_whole_pages_and_the_state_is_kept():
    core = CoreUnderTest()
    core.warm("ann", 20)
    shorter = core.rank("ann", 11)
    core.settle()
    assert core.hits(shorter) == (8, 0, 3)
    assert core.lengths("ann") == (20, 20)


def test_shorter_history_computes_its_private_rows_with_every_suffix_piece():
    core = CoreUnderTest(max_batch_tokens=8)
    core.warm("ann", 20)
    core.runner.steps.clear()
    core.rank("ann", 11, candidates=9)
    core.settle()
    assert core.pieces == [[(8, 11, 5)], [(8, 11, 4)]]


def test_edited_history_keeps_the_whole_pages_that_match():
    core = CoreUnderTest()
    events = list(range(20))
    core.warm("ann", events)
    edited = core.rank("ann", [*events[:10], 39, *events[11:]])
    core.settle()
    assert core.hits(edited) == (8, 0, 12)


def test_retrieve_reruns_the_last_row_and_appends_nothing():
    core = CoreUnderTest()
    core.warm("ann", 10)
    core.runner.steps.clear()
    request_id = core.retrieve("ann", 10, top_k=3)
    core.settle()
    assert core.pieces == [[(10, 10, 1)]]
    assert core.response(request_id).items.tolist() == [0, 1, 2]
    assert core.response(request_id).user_embedding is None


def test_empty_history_is_ranked():
    core = CoreUnderTest()
    request_id = core.rank("ann", [])
    core.settle()
    assert core.pieces == [[(0, 0, 3)]]
    assert core.hits(request_id) == (0, 0, 0)
    assert core.lengths("ann") is None


@pytest.mark.parametrize("mode", ["rank", "retrieve"])
def test_user_embedding_is_given_when_asked_for(mode):
    core = CoreUnderTest()
    request_id = getattr(core, mode)("ann", 10, return_user_embedding=True)
    core.settle()
    assert core.response(request_id).user_embedding.shape == (4,)
