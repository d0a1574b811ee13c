"""Which histories are kept for a refresh."""

import numpy as np

from engine.request_builder import build_request
from engine.types import Task
from engine.weights.histories import Histories


def rank(user, history=(1, 2, 3), **options):
    return build_request(
        task=Task.RANK, user_id=user, history=list(history), candidates=[7], **options
    )


def test_the_users_seen_last_are_kept_newest_first():
    histories = Histories(2)
    for user in ("ann", "bob", "ann", "cid"):
        histories.note(rank(user))
    assert [request.user_id for request in histories.newest_first()] == ["cid", "ann"]


def test_a_kept_history_is_a_plain_prefetch():
    histories = Histories(1)
    histories.note(rank("ann", top_k=1, deadline_ms=5.0, cache="refresh", namespace="n"))
    (kept,) = histories.newest_first()
    assert (kept.task, kept.cache, kept.namespace) == (Task.PREFETCH, "use", "n")
    assert kept.candidates is None and kept.top_k is None and kept.deadline_s is None
    np.testing.assert_array_equal(kept.history["item"], [1, 2, 3])


def test_what_has_no_whole_history_to_keep_is_not_kept():
    histories = Histories(4)
    histories.note(rank("bypass", cache="bypass"))
    histories.note(rank("delta", base_length=4, base_fingerprint="0" * 32))
    histories.note(build_request(task=Task.PREFETCH, user_id="known"))
    assert histories.newest_first() == []


def test_nothing_is_kept_unless_asked_for():
    histories = Histories(0)
    histories.note(rank("ann"))
    assert histories.newest_first() == []


def test_users_are_forgotten_one_by_one_and_all_together():
    histories = Histories(4)
    for user in ("ann", "bob", "cid"):
        histories.note(rank(user))
    histories.forget("", "bob")
    histories.forget("other", "ann")
    assert [request.user_id for request in histories.newest_first()] == ["cid", "ann"]
    histories.clear()
    assert histories.newest_first() == []
