"""What the core measures about itself: steps, onloads, the rate of answers, gauges."""

from __future__ import annotations

from collections.abc import Callable

from engine.block_manager.reservation import PoolUsage
from engine.metrics import Metrics
from engine.runner.step import StepResult
from engine.scheduler.pieces import StepPlan
from engine.transfer.jobs import CopyJob

_WEIGHT_OF_NEWEST_GAP = 0.05


class Meter:
    """Owned by the core thread.

    Onloads are noted from `onload_started` until somebody has used or dropped them, so that what a
    step waited for can be set against how long its onloads took.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._onload_ended_s: dict[CopyJob, float | None] = {}
        self._answer_gap_s: float | None = None
        self._last_answer_s = 0.0

    def onload_started(self, job: CopyJob) -> None:
        self._onload_ended_s[job] = None

    def onload_ended(self, job: CopyJob) -> None:
        """The copy has ended; one that nobody waits for any more is ignored."""
        if job in self._onload_ended_s:
            self._onload_ended_s[job] = self._clock()

    def onload_dropped(self, job: CopyJob) -> None:
        """Nobody will use it."""
        del self._onload_ended_s[job]

    def onloads_used(self, jobs: list[CopyJob], waited_s: float) -> None:
        """Seconds from the first job's start to the last one's end, and how many were hidden."""
        ended_s = [self._onload_ended_s.pop(job) or self._clock() for job in jobs]
        if jobs:
            took_s = max(ended_s) - min(job.started_s for job in jobs)
            self._metrics.add("onload_seconds_total", max(0.0, took_s))
            self._metrics.add("onload_hidden_seconds_total", max(0.0, took_s - waited_s))

    def step_ended(self, step: StepPlan, result: StepResult, onloads: list[CopyJob]) -> None:
        metrics = self._metrics
        metrics.observe("step_seconds", result.run_s)
        metrics.observe("onload_wait_seconds", result.onload_wait_s)
        metrics.observe("step_tokens", step.num_rows)
        metrics.observe("step_requests", len(step.pieces))
        metrics.add("uncut_pieces_total", step.is_uncut)
        self.onloads_used(onloads, result.onload_wait_s)

    def answered(self, admitted_s: float, now_s: float) -> None:
        """Average the seconds between answers, not counting those without any request."""
        gap_s = now_s - max(self._last_answer_s, admitted_s)
        mean_s = gap_s if self._answer_gap_s is None else self._answer_gap_s
        self._answer_gap_s = mean_s + _WEIGHT_OF_NEWEST_GAP * (gap_s - mean_s)
        self._last_answer_s = now_s

    def seconds_to_answer(self, num_requests: int) -> float:
        """When that many requests will have been answered; within [1, 60]."""
        if self._answer_gap_s is None:
            return 1.0
        return min(60.0, max(1.0, num_requests * self._answer_gap_s))

    def set_gauges(self, usage: PoolUsage, *, num_waiting: int, num_running: int) -> None:
        metrics = self._metrics
        metrics.set("requests_waiting", num_waiting)
        metrics.set("requests_running", num_running)
        metrics.set("device_pages_used", usage.pages_used)
        metrics.set("device_pages_total", usage.num_pages)
        metrics.set("host_chunks_used", usage.chunks_used)
        metrics.set("host_chunks_total", usage.num_chunks)
        metrics.set("users_resident", usage.users_device, "device")
        metrics.set("users_resident", usage.users_host, "host")
        metrics.set("copies_in_flight", usage.num_onloads, "onload")
        metrics.set("copies_in_flight", usage.num_copies - usage.num_onloads, "offload")
