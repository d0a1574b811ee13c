"""Phases of a connection and their deadlines, under a clock of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.entrypoints.config import ConnectionConfig
from engine.entrypoints.http_watch import Phase, Watch

LIMITS = ConnectionConfig(
    header_timeout_s=10, body_idle_timeout_s=5, body_timeout_s=60, send_timeout_s=20,
    keep_alive_s=75,
)  # fmt: skip


class Timer:
    def __init__(self, when_s: float, call: Callable[[], None]) -> None:
        self.when_s = when_s
        self.call = call
        self.is_cancelled = False

    def when(self) -> float:
        return self.when_s

    def cancel(self) -> None:
        self.is_cancelled = True


class Clock:
    """The part of an event loop that a watch uses; `run_until` calls what is due."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when_s, call))
        return self.timers[-1]

    def run_until(self, now_s: float) -> None:
        while due := [timer for timer in self.timers if timer.when_s <= now_s]:
            timer = min(due, key=Timer.when)
            self.timers.remove(timer)
            self.now_s = max(self.now_s, timer.when_s)
            if not timer.is_cancelled:
                timer.call()
        self.now_s = now_s


class Connection:
    """Notes when it is told that something is over."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.num_unsent = 0
        self.is_held_up = False
        self.ends: list[tuple[str, float]] = []

    def phase_is_over(self) -> None:
        self.ends.append(("phase", self._clock.now_s))

    def answer_is_stuck(self) -> None:
        self.ends.append(("stuck", self._clock.now_s))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def connection(clock: Clock) -> Connection:
    return Connection(clock)


@pytest.fixture
def watch(connection: Connection, clock: Clock) -> Watch:
    loop: Any = clock
    return Watch(connection, LIMITS, loop)


def test_a_first_request_must_come_sooner_than_a_later_one(
    watch: Watch, connection: Connection, clock: Clock
) -> None:
    watch.enter(Phase.IDLE)
    clock.run_until(111)
    assert connection.ends == [("phase", 110.0)]


def test_an_idle_connection_ends_after_its_time(
    watch: Watch, connection: Connection, clock: Clock
) -> None:
    watch.enter(Phase.ANSWER)
    clock.run_until(1000)
    assert connection.ends == []
    watch.enter(Phase.IDLE)
    clock.run_until(2000)
    assert connection.ends == [("phase", 1075.0)]


def test_data_does_not_prolong_headers(watch: Watch, connection: Connection, clock: Clock) -> None:
    watch.enter(Phase.HEADERS)
    for now_s in range(101, 110):
        clock.run_until(now_s)
        watch.saw_data()
    clock.run_until(120)
    assert connection.ends == [("phase", 110.0)]


def test_a_body_may_take_its_time_but_not_pause(
    watch: Watch, connection: Connection, clock: Clock
) -> None:
    watch.enter(Phase.BODY)
    for now_s in range(104, 153, 4):
        clock.run_until(now_s)
        watch.saw_data()
    assert connection.ends == []
    clock.run_until(170)
    assert connection.ends == [("phase", 157.0)]


def test_a_body_that_drips_ends_all_the_same(
    watch: Watch, connection: Connection, clock: Clock
) -> None:
    watch.enter(Phase.BODY)
    for now_s in range(104, 165, 4):
        clock.run_until(now_s)
        watch.saw_data()
    assert connection.ends == [("phase", 160.0)]


def test_a_client_is_not_blamed_while_reading_is_paused(
    watch: Watch, connection: Connection, clock: Clock
) -> None:
    watch.enter(Phase.BODY)
    connection.is_held_up = True
    clock.run_until(500)
    assert connection.ends == []
    connection.is_held_up = False
    clock.run_until(600)
    assert [what for what, _ in connection.ends] == ["phase"]


def test_an_answer_that_is_taken_slowly_but_steadily_is_sent(
    watch: Watch, connection: Connection, clock: Clock
) -> None:
    watch.enter(Phase.ANSWER)
    connection.num_unsent = 300_000
    watch.begin_sending()
    for _ in range(4):
        connection.num_unsent -= 70_000
        clock.run_until(clock.now_s + 20)
    assert connection.ends == []
    connection.num_unsent -= 10_000
    clock.run_until(clock.now_s + 20)
    assert connection.ends == [("stuck", 200.0)]


def test_a_closed_connection_lingers_for_a_moment_only(
    watch: Watch, connection: Connection, clock: Clock
) -> None:
    watch.enter(Phase.CLOSING)
    watch.begin_sending()
    clock.run_until(103)
    assert connection.ends == [("stuck", 102.0)]


def test_one_timer_serves_many_requests(watch: Watch, connection: Connection, clock: Clock) -> None:
    watch.enter(Phase.IDLE)
    for _ in range(100):
        for phase in (Phase.HEADERS, Phase.BODY, Phase.ANSWER, Phase.IDLE):
            watch.enter(phase)
    assert len([timer for timer in clock.timers if not timer.is_cancelled]) == 1
    watch.stop()
    clock.run_until(1000)
    assert connection.ends == []
