"""Fakes of what the engine takes from outside: the clock, the copies, the executor.

They let a test decide when time passes, when a copy moves and when a step runs. Nothing here
imports torch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from engine.core_parts import ServedModel
from engine.errors import EngineError
from engine.models.base import Model
from engine.transfer.jobs import CopyEngine, CopyJob, CopyProgress, Direction

T = TypeVar("T")


class FakeClock:
    """Monotonic seconds that pass only when told to."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "a monotonic clock does not go back"
        self.now_s += seconds


class Ended(NamedTuple, Generic[T]):
    """What an executor's `done` gives: the value, or the exception raised."""

    value: T | None
    error: BaseException | None

    def result(self) -> T | None:
        """The value; raises the error if there is one."""
        if self.error is not None:
            raise self.error
        return self.value


class ManualLoader:
    """A model loader whose loads end when the test says so.

    Attributes:
        running: Path of the load under way.
    """

    def __init__(self) -> None:
        self.running: str | None = None
        self._ended: dict[str, ServedModel | EngineError] = {}

    def load(
        self, path: str, version: str | None, beside: Model
    ) -> Callable[[], ServedModel | None]:
        return self._start(path)

    def grow(self, path: str, model: Model) -> Callable[[], ServedModel | None]:
        return self._start(path)

    def end(self, ended: ServedModel | EngineError) -> None:
        """The load under way ends with that."""
        assert self.running is not None, "no load is under way"
        self._ended[self.running] = ended
        self.running = None

    def close(self) -> None:
        pass

    def _start(self, path: str) -> Callable[[], ServedModel | None]:
        assert self.running is None, "one load at a time"
        self.running = path
        self._ended.pop(path, None)

        def result() -> ServedModel | None:
            ended = self._ended.get(path)
            if isinstance(ended, EngineError):
                raise ended
            return ended

        return result


class ManualExecutor(Generic[T]):
    """An executor whose functions run when the test says so, in the test's thread."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], T]] = deque()
        self._ended: deque[Ended[T]] = deque()

    def submit(self, fn: Callable[[], T]) -> None:
        self.waiting.append(fn)

    def run_next(self) -> None:
        """Run the oldest submitted function."""
        fn = self.waiting.popleft()
        try:
            self._ended.append(Ended(fn(), None))
        except BaseException as error:  # an executor returns errors, it does not lose them
            self._ended.append(Ended(None, error))

    def done(self) -> Ended[T] | None:
        return self._ended.popleft() if self._ended else None

    def close(self) -> None:
        while self.waiting:
            self.run_next()


class ManualCopyEngine:
    """Copies without bytes: jobs move when the test says so, or at the next poll.

    Attributes:
        is_automatic: Every poll starts and completes all jobs submitted before it.
        submitted: All jobs ever submitted, in order.
        queued, started: Jobs by state, in order.
    """

    def __init__(
        self, *, is_automatic: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_automatic = is_automatic
        self.submitted: list[CopyJob] = []
        self.queued: list[CopyJob] = []
        self.started: list[CopyJob] = []
        self._clock = clock
        self._news: list[CopyProgress] = []
        self._is_closed = False

    def submit(self, job: CopyJob) -> None:
        assert not self._is_closed, "submit after close"
        job.handle, job.started_s = len(self.submitted), self._clock()
        self.submitted.append(job)
        self.queued.append(job)

    def cancel(self, job: CopyJob) -> bool:
        if job not in self.queued:
            return False
        self.queued.remove(job)
        job.succeeded = False
        return True

    def start(self, job: CopyJob) -> None:
        """From now on the job can no longer be cancelled."""
        self.queued.remove(job)
        self.started.append(job)

    def advance(self, job: CopyJob, pages_done: int) -> None:
        """An offload has copied that many pages so far."""
        assert job.direction is Direction.OFFLOAD, "an onload reports nothing until it is complete"
        self._ensure_started(job)
        self._news.append(CopyProgress(job, pages_done, False, None))

    def finish(self, job: CopyJob) -> None:
        self._end(job, job.num_pages, None)

    def fail(self, job: CopyJob, *, pages_done: int = 0, error: str = "injected") -> None:
        self._end(job, pages_done, error)

    def poll(self) -> list[CopyProgress]:
        if self.is_automatic:
            for job in [*self.started, *self.queued]:
                self.finish(job)
        news, self._news = self._news, []
        for progress in news:
            if progress.is_finished:
                progress.job.succeeded = progress.error is None
        return news

    def wait_layer(self, job: CopyJob, layer: int, deadline_s: float) -> bool:
        """Never blocks: an automatic engine finishes the job first; else late means late."""
        if self.is_automatic and (job in self.queued or job in self.started):
            self.finish(job)
        ends = [news for news in self._news if news.job is job and news.is_finished]
        return job.succeeded is True or any(end.error is None for end in ends)

    def close(self) -> None:
        self._is_closed = True
        for job in list(self.queued):
            self.cancel(job)

    def _ensure_started(self, job: CopyJob) -> None:
        if job in self.queued:
            self.start(job)
        assert job in self.started, "the job has ended or was never submitted"

    def _end(self, job: CopyJob, pages_done: int, error: str | None) -> None:
        self._ensure_started(job)
        self.started.remove(job)
        self._news.append(CopyProgress(job, pages_done, True, error))


class WakeLike(Protocol):
    """What FaultyCopyEngine sets when a job that it failed itself has ended."""

    def set(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Faulty:
    """A job on its way through FaultyCopyEngine.

    `inner`: the job the wrapped engine copies (shorter than `job` when `job` is to fail); None
    until it is passed on.
    """

    job: CopyJob
    fail_after: int | None
    due_s: float
    inner: CopyJob | None = None


class FaultyCopyEngine:
    """Wraps any copy engine: holds jobs back, delays their start, fails chosen ones.

    Jobs keep their order within a direction. A job held back has not started: it can be cancelled,
    and waiting for its layers blocks until it is released and copied, or its deadline passes. A
    job that fails first copies some of its pages, as a real one would.

    Args:
        inner: The engine that moves the bytes. Only this wrapper may poll it.
        wake: Set where `inner` cannot know that the core must look.
        clock: Monotonic seconds.

    Attributes:
        submitted: All jobs ever submitted, in order.
    """

    def __init__(
        self,
        inner: CopyEngine,
        wake: WakeLike | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.submitted: list[CopyJob] = []
        self._inner = inner
        self._wake = wake
        self._clock = clock
        self._changed = threading.Condition()
        self._held: set[Direction] = set()
        self._delay_s = 0.0
        self._failures: dict[Direction, dict[int, int]] = {side: {} for side in Direction}
        self._counts = dict.fromkeys(Direction, 0)
        self._queues: dict[Direction, deque[_Faulty]] = {side: deque() for side in Direction}
        self._passed: dict[CopyJob, _Faulty] = {}
        self._by_inner: dict[CopyJob, _Faulty] = {}

    def hold(self, *directions: Direction) -> None:
        """Keep jobs of these directions (default both) back until `release`."""
        with self._changed:
            self._held.update(directions or Direction)

    def release(self, *directions: Direction) -> None:
        """Let held jobs of these directions (default both) and later ones go."""
        with self._changed:
            self._held.difference_update(directions or Direction)
            self._pass_on()

    def release_next(self, direction: Direction) -> CopyJob:
        """Let the oldest held job of a direction go; the others stay."""
        with self._changed:
            faulty = self._queues[direction].popleft()
            self._start(faulty)
            return faulty.job

    def delay(self, seconds: float) -> None:
        """Start every later job that long after its submission."""
        with self._changed:
            self._delay_s = seconds

    def fail_nth(self, nth: int, direction: Direction, *, after_pages: int = 0) -> None:
        """Fail the nth job of a direction counted from now (1: the next), after copying
        `after_pages` of its pages."""
        with self._changed:
            self._failures[direction][self._counts[direction] + nth] = after_pages

    def held_jobs(self, direction: Direction) -> list[CopyJob]:
        """Jobs of a direction that have not been passed on, oldest first."""
        with self._changed:
            return [faulty.job for faulty in self._queues[direction]]

    def submit(self, job: CopyJob) -> None:
        with self._changed:
            job.started_s = self._clock()
            job.handle = len(self.submitted)
            self.submitted.append(job)
            self._counts[job.direction] += 1
            fail_after = self._failures[job.direction].pop(self._counts[job.direction], None)
            faulty = _Faulty(job, fail_after, job.started_s + self._delay_s)
            self._queues[job.direction].append(faulty)
            if self._delay_s:
                timer = threading.Timer(self._delay_s, self._on_time)
                timer.daemon = True
                timer.start()
            self._pass_on()

    def cancel(self, job: CopyJob) -> bool:
        with self._changed:
            queue = self._queues[job.direction]
            for faulty in queue:
                if faulty.job is job:
                    queue.remove(faulty)
                    job.succeeded = False
                    self._changed.notify_all()
                    return True
            passed = self._passed.get(job)
            if passed is None or passed.inner is None or not self._inner.cancel(passed.inner):
                return False
            self._forget(passed)
            job.succeeded = False
            return True

    def poll(self) -> list[CopyProgress]:
        with self._changed:
            self._pass_on()
            return [self._translate(progress) for progress in self._inner.poll()]

    def wait_layer(self, job: CopyJob, layer: int, deadline_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: job in self._passed or job.succeeded is not None,
                timeout=max(0.0, deadline_s - self._clock()),
            )
            faulty = self._passed.get(job)
            if faulty is None:
                return job.succeeded is True
        if faulty.fail_after is not None or faulty.inner is None:
            return False
        return self._inner.wait_layer(faulty.inner, layer, deadline_s)

    def close(self) -> None:
        with self._changed:
            for queue in self._queues.values():
                for faulty in queue:
                    faulty.job.succeeded = False
                queue.clear()
            self._changed.notify_all()
        self._inner.close()

    def _on_time(self) -> None:
        with self._changed:
            self._pass_on()

    def _pass_on(self) -> None:
        """Start what is neither held nor waiting for its time; the caller holds the condition."""
        now_s = self._clock()
        for direction, queue in self._queues.items():
            while queue and direction not in self._held and queue[0].due_s <= now_s:
                self._start(queue.popleft())

    def _start(self, faulty: _Faulty) -> None:
        job, pages = faulty.job, faulty.fail_after
        faulty.inner = CopyJob(
            direction=job.direction,
            first_page=job.first_page,
            pages=job.pages[:pages],
            host_slots=job.host_slots[:pages],
            owner=job.owner,
            branch=job.branch,
        )
        self._passed[job] = faulty
        self._by_inner[faulty.inner] = faulty
        self._inner.submit(faulty.inner)
        self._changed.notify_all()
        if self._wake is not None:
            self._wake.set()

    def _forget(self, faulty: _Faulty) -> None:
        assert faulty.inner is not None
        del self._passed[faulty.job], self._by_inner[faulty.inner]
        self._changed.notify_all()

    def _translate(self, progress: CopyProgress) -> CopyProgress:
        """The wrapped engine's report, as a report about the job that was submitted here."""
        faulty = self._by_inner[progress.job]
        job, pages_done, error = faulty.job, progress.pages_done, progress.error
        if faulty.fail_after is not None:
            error = error or "injected"
            if job.direction is Direction.ONLOAD:
                pages_done = 0
            if not progress.is_finished:
                error = None
        if progress.is_finished:
            job.succeeded = error is None
            self._forget(faulty)
        return CopyProgress(job, pages_done, progress.is_finished, error)


def drain(
    copies: CopyEngine, jobs: Iterable[CopyJob], *, timeout_s: float = 60.0
) -> list[CopyProgress]:
    """Poll until all these jobs have ended; everything that was reported, in order.

    Raises TimeoutError after `timeout_s` of real time.
    """
    waiting, reports = set(jobs), list[CopyProgress]()
    deadline_s = time.monotonic() + timeout_s
    while waiting:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{len(waiting)} copy jobs have not ended after {timeout_s} s")
        reports += copies.poll()
        waiting -= {report.job for report in reports if report.is_finished}
    return reports
