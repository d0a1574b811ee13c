"""Which made-up requests run before a model serves, and that nothing that serves is touched."""

import logging

import pytest
from core_harness import tiny_model
from engine_models import CONFIGS, MAX_EVENTS

from engine.assembly import Hooks, build_core
from engine.config import CacheConfig, EngineConfig, TransferConfig
from engine.errors import TooLarge, to_record
from engine.models.random_weights import builtin_model
from engine.testing.fakes import FakeClock
from engine.types import Outcome, Response, Task, Usage
from engine.warm_up import warm_up

PAGE_SIZE = 32


class RecordingCore:
    """Answers every request after `seconds`, or with an error."""

    def __init__(self, num_pages, clock, seconds, error=None):
        self.num_pages = num_pages
        self.requests = []
        self.is_closed = False
        self._clock, self._seconds, self._error = clock, seconds, error
        self._outbox = []

    def submit(self, request):
        self.requests.append(request)

    def step(self):
        self._clock.advance(self._seconds)
        usage = Usage(computed_tokens=0, history_length=0, fingerprint="", weights_version="1")
        response = None if self._error else Response(request_id="sample", usage=usage)
        error = to_record(self._error) if self._error else None
        self._outbox.append(Outcome(request_id="sample", response=response, error=error))
        return True

    def take_outbox(self):
        taken, self._outbox = self._outbox, []
        return taken

    def close(self):
        self.is_closed = True


def run_warm_up(seconds, error=None):
    """The cores that a warm-up of the built-in model used, and what it says that it took."""
    clock, cores = FakeClock(), []

    def make_core(num_pages):
        cores.append(RecordingCore(num_pages, clock, seconds, error))
        return cores[-1]

    return cores, warm_up(builtin_model(), make_core, PAGE_SIZE, clock)


def lengths(core):
    return [(request.task, len(request.history["item"])) for request in core.requests]


def test_lengths_grow_to_the_longest_history_while_rounds_are_quick():
    cores, took_s = run_warm_up(seconds=0.01)
    assert [lengths(core)[-1][1] for core in cores] == [64, 256, 1024, 4096]
    assert [core.num_pages for core in cores] == [3, 9, 33, 129]
    assert took_s == pytest.approx(12 * 0.01)
    assert all(core.is_closed for core in cores)


def test_a_round_computes_appends_and_runs_every_task():
    cores, _ = run_warm_up(seconds=0.0)
    assert lengths(cores[1]) == [(Task.RANK, 240), (Task.RANK, 256), (Task.RETRIEVE, 256)]
    assert len(cores[1].requests[0].candidates["item"]) == 256


def test_a_round_that_may_take_longer_than_the_budget_is_left_out():
    # Rounds of 0.3 s: the next one could take 4.8 s.
    cores, took_s = run_warm_up(seconds=0.1)
    assert [lengths(core)[-1][1] for core in cores] == [64, 256]
    assert took_s == pytest.approx(0.6)


def test_slow_first_steps_do_not_count_as_slow_rounds():
    cores, _ = run_warm_up(seconds=0.99)
    assert [lengths(core)[-1][1] for core in cores] == [64, 256]


def test_a_refused_request_ends_it_with_a_warning(caplog):
    cores, _ = run_warm_up(seconds=0.0, error=TooLarge("too large for max_uncut_tokens"))
    assert len(cores) == 1
    assert cores[0].is_closed
    assert "warm-up ends early: too large for max_uncut_tokens" in caplog.text


def build(model, *, is_wanted=True, uses_device_thread=True):
    cache = CacheConfig(device_pages=64, page_size=8, chunk_size=16, host_bytes=1 << 20)
    config = EngineConfig(
        cache=cache, transfer=TransferConfig(workers="python"), threads=1, warm_up=is_wanted
    )
    return build_core(model, config, Hooks(uses_device_thread=uses_device_thread))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_kind_of_model_warms_up_to_its_longest_history(name, caplog):
    with caplog.at_level(logging.INFO):
        core = build(tiny_model(name))
    core.close()
    assert f"histories up to {MAX_EVENTS} events (the model takes {MAX_EVENTS})" in caplog.text
    assert "ends early" not in caplog.text


def test_what_serves_is_not_touched():
    core = build(tiny_model("append"))
    try:
        usage, served = core.usage(), core._versions.active
        assert (usage.pages_used, usage.num_users) == (0, 0)
        assert served.runner._pools.num_pages == 64
        assert not any(served.runner._pools.raw(layer).any() for layer in range(2))
        assert served.warm_up_s > 0
        assert core.metrics.value("requests_total", "rank", "ok") == 0
    finally:
        core.close()


@pytest.mark.parametrize("left_out", [{"is_wanted": False}, {"uses_device_thread": False}])
def test_it_is_left_out_when_it_is_not_wanted_or_gains_nothing(left_out, caplog):
    with caplog.at_level(logging.INFO):
        core = build(tiny_model("append"), **left_out)
    core.close()
    assert "warm-up" not in caplog.text
    assert core._versions.active.warm_up_s == 0.0
