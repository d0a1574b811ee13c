"""Executors: where the steps of the device run.

The core submits a step and is woken when it is done. Exceptions are results: the core decides
what they mean.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from engine.platforms.wake import Wake

T = TypeVar("T")


class Completed(NamedTuple, Generic[T]):
    """The end of one submitted function: its value, or the exception it raised."""

    value: T | None
    error: BaseException | None

    def result(self) -> T | None:
        """The value; raises the error if there is one."""
        if self.error is not None:
            raise self.error
        return self.value


class Executor(Protocol[T]):
    """Runs functions in order of submission. Used by one thread, the core's."""

    def submit(self, fn: Callable[[], T]) -> None:
        """Run the function, now or soon."""

    def done(self) -> Completed[T] | None:
        """The oldest end not yet taken; None when nothing has ended. Never blocks."""

    def close(self) -> None:
        """Finish what was submitted and stop. Ends not taken can still be taken."""


def _run(fn: Callable[[], T]) -> Completed[T]:
    try:
        return Completed(fn(), None)
    except BaseException as error:  # reported to the core, which owns the decision
        return Completed(None, error)


class DeviceExecutor(Generic[T]):
    """One thread, named "device", that runs all steps.

    Args:
        wake: Set after every end.
        num_threads: Threads of one torch operation; 0 leaves torch's choice.
    """

    def __init__(self, wake: Wake, num_threads: int = 0) -> None:
        self._wake = wake
        self._num_threads = num_threads
        self._submitted: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
        self._ended: deque[Completed[T]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="device", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[[], T]) -> None:
        assert not self._is_closed, "submit after close"
        self._submitted.put(fn)

    def done(self) -> Completed[T] | None:
        return self._ended.popleft() if self._ended else None

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._submitted.put(None)
        self._thread.join()

    def _loop(self) -> None:
        if self._num_threads:
            # OpenMP keeps this number per thread, so it is set in the thread that computes.
            torch.set_num_threads(self._num_threads)
        while (fn := self._submitted.get()) is not None:
            self._ended.append(_run(fn))
            del fn  # what the function holds must not outlive its end until the next one
            self._wake.set()


class InlineExecutor(Generic[T]):
    """The same face, run by the caller inside `submit`; for the synchronous engine.

    Args:
        wake: Set after every end.
        num_threads: Threads of one torch operation while a function runs; the caller's number is
            put back afterwards. 0 leaves it alone.
    """

    def __init__(self, wake: Wake, num_threads: int = 0) -> None:
        self._wake = wake
        self._num_threads = num_threads
        self._ended: deque[Completed[T]] = deque()

    def submit(self, fn: Callable[[], T]) -> None:
        before = torch.get_num_threads()
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            self._ended.append(_run(fn))
        finally:
            if self._num_threads:
                torch.set_num_threads(before)
        self._wake.set()

    def done(self) -> Completed[T] | None:
        return self._ended.popleft() if self._ended else None

    def close(self) -> None:
        """Nothing runs between calls, so there is nothing to stop."""
