"""Random traffic on tiny pools: arrivals, cancels, deadlines, forgets, copies that fail or hang.

Every answer is compared with a recompute, the bookkeeping is recounted after every pass, every
request ends with exactly one outcome, and in the end the pools are whole.
ENGINE_RANDOM_SEEDS sets how many cases run.
"""

import os
import random

import pytest
from core_harness import CoreUnderTest

SEEDS = range(int(os.environ.get("ENGINE_RANDOM_SEEDS", "25")))
USERS = ("ann", "bob", "cid", "dot", "eve")
MAX_EVENTS = 44


class Traffic:
    """Random things to do to a core, all from one seed."""

    def __init__(self, seed, **options):
        self.random = random.Random(seed)
        self.core = CoreUnderTest(**options)
        self.histories = {user: self._events(self.random.randrange(12)) for user in USERS}

    def _events(self, count):
        return [self.random.randrange(40) for _ in range(count)]

    def _change(self, user):
        """The user does something: mostly new events, sometimes another past."""
        history = self.histories[user]
        kind = self.random.choice(["append"] * 4 + ["same"] * 3 + ["edit", "cut"])
        if kind == "append":
            history = (history + self._events(self.random.randrange(8)))[:MAX_EVENTS]
        elif kind == "edit" and history:
            history = list(history)
            history[self.random.randrange(len(history))] = self.random.randrange(40)
        elif kind == "cut":
            history = history[: self.random.randrange(len(history) + 1)]
        self.histories[user] = history
        shorter = self.random.choice([0, 0, 0, self.random.randrange(len(history) + 1)])
        return history[: len(history) - shorter]

    def arrive(self, **options):
        user = self.random.choice(USERS)
        kind = self.random.choice(["rank"] * 6 + ["retrieve", "prefetch", "known"])
        if kind == "known":
            return self.core.prefetch(user, **options)
        history = self._change(user)
        if self.core.model.spec.num_context:
            options["context"] = [USERS.index(user) % self.random.choice([3, 3, 3, 1])]
        if kind == "retrieve" and history:
            return self.core.retrieve(user, history, **options)
        if kind == "prefetch":
            return self.core.prefetch(user, history, **options)
        cache = self.random.choice(["use"] * 8 + ["refresh", "bypass"])
        candidates = self.random.randrange(1, 16)
        return self.core.rank(user, history, candidates, cache=cache, **options)

    def cancel_one(self):
        unfinished = [name for name in self.core.requests if name not in self.core.outcomes]
        if unfinished:
            self.core.cancel(self.random.choice(unfinished))

    def move_a_copy(self):
        jobs = self.core.copies.onloads + self.core.copies.offloads
        if not jobs:
            return
        job, queued = self.random.choice(jobs), self.core.copies.queued
        # Jobs of one direction start in order.
        job = next(other for other in jobs if other.direction is job.direction)
        kind = self.random.choice(["start", "finish", "finish", "finish", "fail", "advance"])
        if kind == "start" and job in queued:
            self.core.copies.start(job)
        elif kind == "finish":
            self.core.copies.finish(job)
        elif kind == "fail":
            self.core.copies.fail(job)
        elif kind == "advance" and job in self.core.copies.offloads:
            self.core.copies.advance(job, job.num_pages // 2)

    def pass_time(self):
        self.core.clock.advance(self.random.choice([0.0, 0.002, 0.05]))

    def anything(self):
        kind = self.random.choice(
            ["arrive"] * 5 + ["step"] * 6 + ["device"] * 5 + ["copy"] * 4
            + ["cancel"] * 2 + ["late", "forget", "time"]
        )  # fmt: skip
        if kind == "arrive":
            self.arrive(priority=self.random.choice([0, 0, 0, 1, 3]))
        elif kind == "late":
            self.arrive(deadline_ms=self.random.choice([1, 15, 40]))
        elif kind == "step":
            self.core.step()
        elif kind == "device" and self.core.executor.waiting:
            self.core.run_device()
        elif kind == "copy":
            self.move_a_copy()
        elif kind == "cancel":
            self.cancel_one()
        elif kind == "forget":
            self.core.forget(self.random.choice(USERS))
        elif kind == "time":
            self.pass_time()


def random_options(seed):
    choose = random.Random(-seed - 1).choice
    return {
        "model": choose(["append", "append", "exact"]),
        "pages": choose([6, 8, 11, 14]),
        "page_size": choose([3, 4]),
        "chunks": choose([0, 1, 3, 8]),
        "tiers": choose(["tiered"] * 5 + ["device", "off"]),
        "automatic_copies": False,
        "copy_timeout_s": choose([0.02, 10.0]),
        "max_onload_bytes": choose([0, 0, 1, 4000]),
        "max_batch_requests": choose([1, 2, 4]),
        "max_batch_tokens": choose([8, 13, 30]),
        "max_piece_tokens": choose([0, 4, 8]),
        "max_step_ms": choose([0.0, 0.0, 15.0]),
        "max_queue_requests": choose([6, 100]),
        "look_ahead": choose([True, True, False]),
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_ends_once_and_the_pools_are_whole(seed):
    traffic = Traffic(seed, **random_options(seed))
    for _ in range(150):
        traffic.anything()
    codes = {outcome.error.code for outcome in traffic.core.outcomes.values() if outcome.error}
    expected = {"cancelled", "deadline_exceeded", "overloaded", "invalid_request"}
    assert codes <= expected
    traffic.core.copies.is_automatic = True
    traffic.core.assert_everything_comes_back()
    assert traffic.core.core._meter._onload_ended_s == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_abort_at_any_moment_answers_everything(seed):
    traffic = Traffic(seed, **random_options(seed))
    for _ in range(20 + 7 * seed % 60):
        traffic.anything()
    traffic.core.core.close()
    traffic.core.collect()
    assert set(traffic.core.outcomes) == set(traffic.core.requests)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_starves_under_endless_arrivals(seed):
    options = random_options(seed)
    options |= {"automatic_copies": True, "max_queue_requests": 100, "copy_timeout_s": 10.0}
    options |= {"max_piece_tokens": 8}
    traffic = Traffic(seed, **options)
    core = traffic.core
    arrived = {}
    for turn in range(120):
        while len(arrived) - len(core.outcomes) < 6:
            arrived[traffic.arrive()] = turn
        core.step()
        if core.executor.waiting:
            core.run_device()
        core.steps()
        oldest = min((arrived[name] for name in arrived if name not in core.outcomes), default=turn)
        # At most 6 requests at a time, each of at most 45 + 15 rows: about 9 pieces.
        assert turn - oldest <= 60
    core.assert_everything_comes_back()
