"""Cached == recomputed, bit for bit, in the situations where caches go wrong.

Every test names one way a kept state can stop belonging to the request, drives a small engine into
it, and compares with an engine that keeps nothing and cuts pages and batches differently.
"""

import numpy as np
import pytest
from engine_models import CONFIGS

from engine.assembly import Hooks
from engine.config import CacheConfig, EngineConfig, SchedulerConfig, TransferConfig
from engine.engine import Engine
from engine.testing.fakes import FaultyCopyEngine
from engine.testing.models import save_random_model
from engine.transfer.jobs import Direction

CANDIDATES = [11, 21, 311, 41]
LONG = list(range(3, 33))


def features(config, events, actions_from=0, time_from=0):
    """Events as the model's features; `actions_from` and `time_from` change them alone."""
    history = {"item": np.array(events, np.int64) * 10 + 1}
    if any(feature.name == "action" for feature in config.inputs.features):
        history["action"] = (np.array(events, np.int64) + actions_from) % 6
    if config.layers.relative_bias:
        history["time"] = time_from + 100 * np.arange(len(events)) ** 2
    return history


class Pair:
    """The engine under test and the one that recomputes."""

    def __init__(self, name, path, page_size=4, device_tokens=256, host_tokens=1024, **scheduler):
        self.config = CONFIGS[name]
        save_random_model(path, self.config)
        layers = self.config.layers
        width = layers.num_layers * layers.num_heads * (layers.qk_dim + layers.v_dim)
        token_bytes = width * (4 if self.config.dtype == "float32" else 2)
        self.cached = Engine.from_model_dir(
            str(path),
            EngineConfig(
                cache=CacheConfig(
                    page_size=page_size,
                    chunk_size=2 * page_size,
                    device_pages=-(-device_tokens // page_size),
                    host_bytes=host_tokens * token_bytes,
                    poison=True,
                    allow_small_pool=True,
                ),
                scheduler=SchedulerConfig(**scheduler),
                transfer=TransferConfig(copy_timeout_s=0.05),
                check_invariants=True,
            ),
            Hooks(wrap_copies=self._wrap, uses_device_thread=False),
        )
        self.plain = Engine.from_model_dir(
            str(path),
            EngineConfig(
                cache=CacheConfig(tiers="off", device_pages=99, page_size=5, chunk_size=5)
            ),
        )

    def _wrap(self, inner):
        self.copies = FaultyCopyEngine(inner)
        return self.copies

    def ask(self, user, events, *, history=None, segment=0, **options):
        """Rank with both; their scores must be the same bits. The cached engine's usage."""
        history = features(self.config, events) if history is None else history
        if self.config.inputs.context:
            options["context"] = [segment]
        if self.config.layers.relative_bias:
            options.setdefault("query_time", 10**6)
        asked = {"user_id": user, "history": history, "candidates": CANDIDATES, **options}
        got, want = self.cached.rank(**asked), self.plain.rank(**{**asked, "cache": "use"})
        np.testing.assert_array_equal(got.scores, want.scores, strict=True)
        return got.usage

    def settle(self):
        self.cached.drain_transfers()

    def close(self):
        self.cached.close()
        self.plain.close()


@pytest.fixture
def pair(tmp_path):
    made = []

    def make(name="append", **sizes):
        made.append(Pair(name, tmp_path / str(len(made)), **sizes))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("page_size", [1, 3, 8])
def test_history_fed_in_growing_requests_equals_the_whole(pair, name, page_size):
    both = pair(name, page_size=page_size)
    for length in (0, 1, 7, 8, 9, 16, 30, 30):
        both.ask("ann", LONG[:length])


@pytest.mark.parametrize("at", [0, 1, 12, 13, 25])
@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_edited_event_is_not_served_from_the_old_state(pair, at, page_size):
    both = pair(page_size=page_size)
    events = LONG[:26]
    both.ask("ann", events)
    edited = [*events[:at], 0, *events[at + 1 :]]
    usage = both.ask("ann", edited)
    assert usage.device_tokens == at // page_size * page_size
    both.ask("ann", [*edited, 1, 2])
    both.ask("ann", events)


def test_edit_inside_the_last_partial_page_is_noticed_when_the_history_grows(pair):
    both = pair(page_size=8)
    both.ask("ann", LONG[:13])
    usage = both.ask("ann", [*LONG[:12], 0, 1, 2])
    assert usage.device_tokens == 8


def test_going_back_to_an_earlier_history_recomputes_what_changed(pair):
    both = pair(page_size=4)
    first, second = LONG[:20], [*LONG[:10], *range(10)]
    for events in (first, second, first, second):
        both.ask("ann", events)
        both.settle()


def test_changed_action_is_not_served_from_the_old_state(pair):
    both = pair("interleaved")
    both.ask("ann", LONG[:12])
    changed = features(both.config, LONG[:12], actions_from=1)
    usage = both.ask("ann", LONG[:12], history=changed)
    assert usage.device_tokens == 0, "the first page holds the first event's action"


def test_changed_times_are_not_served_from_the_old_state(pair):
    both = pair("research")
    both.ask("ann", LONG[:12])
    changed = features(both.config, LONG[:12], time_from=7)
    assert both.ask("ann", LONG[:12], history=changed).device_tokens == 0


def test_later_query_reuses_everything_but_the_provisional_row(pair):
    both = pair("research")
    both.ask("ann", LONG[:12], query_time=20_000)
    assert both.ask("ann", LONG[:12], query_time=90_000).device_tokens == 11


@pytest.mark.parametrize("name", ["interleaved", "exact"])
def test_new_context_and_back_again(pair, name):
    both = pair(name)
    for segment in (0, 1, 0):
        usage = both.ask("ann", LONG[:12], segment=segment)
        assert usage.device_tokens == 0
    assert both.ask("ann", LONG[:12], segment=0).computed_tokens == 0


def test_exact_mode_reuses_only_the_same_history(pair):
    both = pair("exact")
    both.ask("ann", LONG[:12])
    assert both.ask("ann", LONG[:12]).computed_tokens == 0
    assert both.ask("ann", LONG[:13]).device_tokens == 0


def test_shorter_history_is_served_and_the_state_kept(pair):
    both = pair(page_size=8)
    both.ask("ann", LONG[:30])
    usage = both.ask("ann", LONG[:21])
    assert (usage.device_tokens, usage.computed_tokens) == (16, 5)
    assert both.ask("ann", LONG[:30]).computed_tokens == 0


def test_history_start_moves_the_window_by_the_stride(pair):
    both = pair("stride")
    events = [event % 40 for event in range(70)]
    for start, stop in ((0, 40), (0, 48), (0, 50), (8, 50), (16, 70), (24, 70)):
        sent = events[start:stop]
        both.ask("ann", sent, history_start=start)


@pytest.mark.parametrize("host_tokens", [0, 24, 1024])
def test_users_evicted_in_every_order_come_back_right(pair, host_tokens):
    both = pair(page_size=4, device_tokens=40, host_tokens=host_tokens)
    users = {user: LONG[:length] for user, length in zip("abcd", (13, 22, 29, 17), strict=True)}
    for order in ("abcd", "dcba", "acbd", "bbad", "dabc"):
        for user in order:
            both.ask(user, users[user])
            both.settle()
    if host_tokens == 1024:
        assert both.cached.core.metrics.value("hit_tokens_total", "host") > 0


def test_old_offload_that_ends_after_an_edit_does_not_count(pair):
    """Its pages were handed over before the edit; what it copied is another history."""
    both = pair(page_size=4, device_tokens=48)
    both.copies.hold(Direction.OFFLOAD)
    both.ask("ann", LONG[:16])
    started = both.copies.release_next(Direction.OFFLOAD)
    edited = [*LONG[:4], 0, *LONG[5:16]]
    both.ask("ann", edited)
    both.copies.release()
    both.settle()
    assert started.num_pages == 4
    for user in "bcd":
        both.ask(user, LONG[:24])
        both.settle()
    assert both.ask("ann", edited).host_tokens > 0


def test_failed_offload_leaves_no_hole_below_later_ones(pair):
    both = pair(page_size=4, device_tokens=48)
    both.copies.fail_nth(1, Direction.OFFLOAD, after_pages=1)
    both.copies.hold(Direction.OFFLOAD)
    both.ask("ann", LONG[:16])
    both.ask("ann", LONG[:24])
    both.copies.release()
    both.settle()
    for user in "bcd":
        both.ask(user, LONG[:24])
        both.settle()
    both.ask("ann", LONG[:24])


@pytest.mark.parametrize("fault", ["fails", "is late"])
def test_onload_that_goes_wrong_is_a_miss(pair, fault):
    both = pair(page_size=4, device_tokens=32)
    for user in "ab":
        both.ask(user, LONG[:24])
        both.settle()
    if fault == "fails":
        both.copies.fail_nth(1, Direction.ONLOAD, after_pages=2)
    else:
        both.copies.hold(Direction.ONLOAD)
    usage = both.ask("a", LONG[:24])
    assert usage.computed_tokens >= 16
    both.copies.release()
    both.ask("a", LONG[:24])


def test_forgotten_user_starts_from_nothing(pair):
    both = pair()
    both.ask("ann", LONG[:20])
    both.settle()
    forgotten = both.cached.forget("ann")
    assert (forgotten.device_tokens, forgotten.host_tokens) == (20, 20)
    assert both.ask("ann", LONG[:20]).computed_tokens == 20
    both.cached.forget("ann")
    usage = both.cached.core.usage()
    assert (usage.pages_used, usage.chunks_used) == (0, 0)


def test_same_user_id_in_two_namespaces_never_meets(pair):
    both = pair()
    both.ask("ann", LONG[:20], namespace="x")
    assert both.ask("ann", LONG[:20], namespace="y").computed_tokens == 20


def test_bypass_neither_reads_nor_writes(pair):
    both = pair()
    both.ask("ann", LONG[:20])
    usage = both.ask("ann", LONG[:24], cache="bypass")
    assert (usage.device_tokens, usage.computed_tokens) == (0, 24)
    assert both.ask("ann", LONG[:24]).device_tokens == 20


def test_candidates_spread_over_pieces_and_batches_score_the_same(pair):
    both = pair(page_size=4, max_batch_tokens=9, max_batch_requests=2)
    for length in (3, 17, 30):
        both.ask("ann", LONG[:length])
