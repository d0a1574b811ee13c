"""EngineCore: one plain object that owns every mutable thing.

    inbox  submit, cancel, run (commands)
    step   collect finished copies and the finished step; launch the next step; answer and commit
           the finished one; plan the step after and start its onloads
    outbox exactly one Outcome per submitted request, one Reply per command

    core      plan N+1, start onload N+1 | launch N+1, commit N, plan N+2 ...
    device    run N                      | run N+1
    copies    onload N+1                 | offload N, onload N+2

No asyncio, no HTTP, no locks: one thread calls everything here. The device thread only reads the
step plan it was given; copy workers only see jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np

from engine.block_manager.reservation import PoolUsage
from engine.block_manager.user_state import UserKey, UserView
from engine.commands import Command, CoreMessage, ServedWeights
from engine.controls import Controls
from engine.core_dump import CoreState, describe_core
from engine.core_parts import CoreParts, TraceEvent
from engine.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineError,
    InvalidRequest,
    InvariantError,
    to_record,
)
from engine.meter import Meter
from engine.runner.step import PieceResult, PieceWork, StepResult
from engine.scheduler.admission import Admission
from engine.scheduler.answers import Answers
from engine.scheduler.life import Event, State
from engine.scheduler.pieces import Piece, StepPlan
from engine.scheduler.queue import RequestQueue
from engine.scheduler.request import ScheduledRequest
from engine.scheduler.scheduler import Scheduler
from engine.transfer.jobs import CopyJob, CopyProgress
from engine.types import CoreStats, ModelInfo, Outcome, Request
from engine.weights.changes import WeightsChanges
from engine.weights.versions import Versions

_logger = logging.getLogger(__name__)


class EngineCore:
    """The engine without a front. See the module docstring for the loop.

    A bug (a broken invariant, a device thread that died or hangs) raises out of `step`; call
    `abort` then: every pending request still gets its outcome.
    """

    def __init__(self, parts: CoreParts) -> None:
        config = parts.config
        self.wake = parts.wake
        self.metrics = parts.metrics
        self.config = config
        self._executor = parts.executor
        self._copies = parts.copies
        self._loader = parts.loader
        self._observer = parts.observer
        self._config = config
        self._manager = parts.manager
        self._clock = parts.clock
        self._queue = RequestQueue(config.scheduler)
        self._versions = Versions(parts.served, parts.metrics)
        spec = parts.served.model.spec
        self._scheduler = Scheduler(
            config.scheduler,
            parts.manager,
            self._queue,
            bytes_per_token=spec.bytes_per_token_layer * spec.num_layers,
            max_onload_bytes=config.transfer.max_onload_bytes,
        )
        self._admission = Admission(config, parts.manager, self._queue, parts.metrics, parts.clock)
        self._answers = Answers(parts.metrics)
        self._live: dict[str, ScheduledRequest] = {}
        self._outbox: list[CoreMessage] = []
        self._running: StepPlan | None = None
        self._running_since_s = 0.0
        self._upcoming: StepPlan | None = None
        self._moves: list[Piece] = []
        self._num_steps = 0
        self._refusal: EngineError | None = None
        self._has_news = True
        self._meter = Meter(parts.metrics, parts.clock)
        self._own: dict[str, Callable[[Outcome], None]] = {}
        self._changes = WeightsChanges(
            self, config.weights, self._versions, parts.manager, parts.loader, parts.metrics,
            parts.clock,
        )  # fmt: skip
        self._controls = Controls(
            self, parts.manager, self._versions, self._changes, self._outbox, parts.clock
        )

    # Inbox

    def submit(self, request: Request) -> None:
        """Admit a request, or answer it at once with the reason why not. Never raises for a
        bad request: its outcome is in the outbox."""
        if self._refusal is not None:
            self._emit_error(request, self._refusal)
            return
        try:
            if request.request_id in self._live:
                raise InvalidRequest(
                    f"request_id {request.request_id!r} is in use by an unfinished request: "
                    "send another"
                )
            version = self._versions.bind(request).served
            retry_after_s = self._meter.seconds_to_answer(len(self._queue))
            entry = self._admission.admit(request, version, retry_after_s)
        except EngineError as error:
            self._emit_error(request, error)
            return
        if request.request_id not in self._own:
            self._changes.note(request)
        self._yield_to(entry)
        self._live[request.request_id] = entry
        version.num_bound += 1
        self._queue.admit(entry)
        self._has_news = True

    def _yield_to(self, entry: ScheduledRequest) -> None:
        """A client's request does not stand in line behind the engine's own for the same user."""
        for other in self._queue.unfinished_of(entry.line):
            if self._is_own(other) and other.state is State.WAITING:
                self._step_aside(other)

    def _is_own(self, entry: ScheduledRequest) -> bool:
        return entry.request.request_id in self._own

    def _step_aside(self, entry: ScheduledRequest) -> None:
        self.give_up(entry, Cancelled("a request of the same user came"))

    def submit_own(self, request: Request, listener: Callable[[Outcome], None]) -> None:
        """Submit a request that no client sent; the listener is told its outcome."""
        self._own[request.request_id] = listener
        self.submit(request)

    def cancel(self, request_id: str) -> None:
        """Give a request up. Its outcome (`Cancelled`) is in the outbox when this returns; an
        unknown or finished id is ignored. Rows that are being computed for it are kept."""
        entry = self._live.get(request_id)
        if entry is not None:
            self.give_up(entry, Cancelled(f"request {request_id!r} was cancelled"))

    def run(self, ticket: str, command: Command) -> None:
        """Carry out a command. Its Reply comes when it is done, which may be later."""
        self._controls.run(ticket, command)
        self._has_news = True

    def drain(self) -> None:
        """Refuse new requests from now on; `is_idle` tells when the admitted ones are done."""
        self._refusal = Draining("the engine is shutting down: send the request elsewhere")

    def abort(self, error: EngineError) -> None:
        """Answer every unfinished request with the error. New ones are refused with it too."""
        self._refusal = error
        for entry in list(self._live.values()):
            self.give_up(entry, error)
        self._controls.abort(error)

    def unfinished(self) -> Iterable[ScheduledRequest]:
        """All admitted requests that have not ended, in the order of their coming."""
        return list(self._live.values())

    # Outbox

    def take_outbox(self) -> list[CoreMessage]:
        """Everything that came out since the last call."""
        taken = self._outbox.copy()
        self._outbox.clear()
        return taken

    @property
    def info(self) -> ModelInfo:
        """The model with the active weights."""
        return self._versions.active.info

    @property
    def served(self) -> ServedWeights:
        """The weights versions that requests may name."""
        return self._versions.served

    @property
    def is_idle(self) -> bool:
        """No request, step, move or command is unfinished (copies to the host may still run)."""
        is_busy = self._live or self._running or self._upcoming or self._moves
        return not is_busy and self._controls.is_idle

    @property
    def is_quiet(self) -> bool:
        """Idle, and no copy is in flight."""
        return self.is_idle and self._manager.usage().num_copies == 0

    def user(self, namespace: str, user_id: str) -> UserView | None:
        """What is known about a user's state under the active weights; None: nothing."""
        return self._manager.user(UserKey(namespace, user_id, self._versions.active.name))

    def usage(self) -> PoolUsage:
        """Pages, chunks, users and copies at this moment."""
        return self._manager.usage()

    def check_invariants(self) -> None:
        """Recount the bookkeeping; raises InvariantError."""
        self._manager.check_invariants(idle=self.is_quiet)

    # Loop

    def step(self) -> bool:
        """One pass; False when there is nothing to do until `wake` fires (see `wait`)."""
        self.wake.clear()
        has_progress = self._collect_copies()
        self._has_news |= has_progress
        completed = self._executor.done()
        if completed is not None:
            step, self._running = self._running, None
            result = completed.result()
            assert step is not None and result is not None
            self._launch()
            self._finish_step(step, result)
            self._has_news = has_progress = True
        elif self._running is not None:
            self._check_running(self._running)
        has_progress |= self._expire()
        if self._running is None or self._config.scheduler.look_ahead:
            has_progress |= self._plan()
        has_progress |= self._launch()
        has_progress |= self._controls.poll()
        if self._config.check_invariants and not has_progress:
            self.check_invariants()
        return has_progress

    def wait(self, timeout_s: float) -> None:
        """Sleep until a copy or a step ends, at most `timeout_s`."""
        self.wake.wait(timeout_s)

    def close(self) -> None:
        """Stop the device thread and the copy workers. Unfinished requests are answered first."""
        self.abort(EngineDead("the engine was closed"))
        self._loader.close()
        self._executor.close()
        self._copies.close()
        self.wake.close()

    def describe(self) -> str:
        """What the core is doing, for the log; `health.dump_users` decides whether users are named.

        Another thread may call it when the loop hangs: it only reads."""
        state = CoreState(
            now_s=self._clock(),
            refusal=None if self._refusal is None else self._refusal.message,
            unfinished=list(self._live.values()),
            num_waiting=len(self._queue),
            running=self._running,
            running_since_s=self._running_since_s,
            upcoming=self._upcoming,
            moves=list(self._moves),
            copies=self._manager.copies(),
            usage=self.usage(),
            num_commands=self._controls.num_open,
        )
        return describe_core(state, names_users=self._config.health.dump_users)

    def stats(self) -> CoreStats:
        """A snapshot; gauges are brought up to date."""
        num_waiting = len(self._queue)
        num_running = len(self._live) - num_waiting
        self._meter.set_gauges(self.usage(), num_waiting=num_waiting, num_running=num_running)
        return CoreStats(
            samples=self.metrics.snapshot(),
            num_waiting=num_waiting,
            num_running=num_running,
            num_steps=self._num_steps,
            is_draining=self._refusal is not None,
        )

    # Planning and launching

    def _plan(self) -> bool:
        """Fill the upcoming step, if anything has changed since the last try."""
        is_full = self._upcoming is not None and self._upcoming.is_closed
        if is_full or not self._has_news or not len(self._queue):
            return False
        self._has_news = False
        now_s = self._clock()
        in_flight = [piece.entry for piece in self._moves]
        if self._running is not None:
            in_flight += [piece.entry for piece in self._running.pieces]
        planned = self._scheduler.plan(now_s, in_flight, self._upcoming)
        self._upcoming = planned.step if planned.step.pieces else None
        for entry in planned.settled:
            self._queue.take(entry)
            self._answer(entry, Event.ANSWER)
        for entry in planned.unfit:
            self._leave_cache(entry)
        for entry, error in planned.refused:
            self.give_up(entry, error)
        for piece in planned.moves:
            self._moves.append(piece)
            piece.entry.fire(Event.LAUNCH)
        if planned.added:
            self._trace("plan", planned.step.number)
        for piece in planned.moves + planned.added:
            self._start_onload(piece, now_s, planned.step.number)
        self._finish_moves()
        return bool(
            planned.settled or planned.unfit or planned.refused or planned.moves or planned.added
        )

    def _leave_cache(self, entry: ScheduledRequest) -> None:
        """It was admitted when its version had a larger share of the pool: now it must run outside
        the cache, if that is allowed at all."""
        self._queue.take(entry)
        entry.leave_cache("never_fits")
        self._queue.put(entry)
        self._has_news = True
        try:
            self._admission.check_outside(entry)
        except EngineError as error:
            self.give_up(entry, error)

    def _start_onload(self, piece: Piece, now_s: float, step_number: int) -> None:
        job = _onload(piece)
        if job is not None:
            self._meter.onload_started(job)
            self._submit_copy(job, now_s)
            self._trace("onload", step_number)

    def _submit_copy(self, job: CopyJob, now_s: float) -> None:
        job.started_s = now_s
        self._copies.submit(job)

    def _launch(self) -> bool:
        """Start the upcoming step if the device is free."""
        if self._running is not None or self._upcoming is None:
            return False
        step, self._upcoming = self._upcoming, None
        self._has_news = True
        for piece in list(step.pieces):
            if not self._may_start(piece):
                step.remove(piece)
        if not step.pieces:
            return True
        for piece in step.pieces:
            piece.entry.fire(Event.LAUNCH)
        works = [self._work(piece) for piece in step.pieces]
        copy_deadline_s = self._clock() + self._config.transfer.copy_timeout_s
        runner = self._versions.runner_of(step.version)
        self._running, self._running_since_s = step, self._clock()
        self._num_steps += 1
        self._trace("launch", step.number)
        self._executor.submit(
            lambda: runner.run(works, scratch=step.is_scratch, copy_deadline_s=copy_deadline_s)
        )
        return True

    def _check_running(self, step: StepPlan) -> None:
        """Raise InvariantError when the step on the device has run for longer than any may."""
        limit_s = self._config.health.watchdog_s
        age_s = self._clock() - self._running_since_s
        if limit_s and age_s > limit_s:
            raise InvariantError(
                f"step {step.number} has run for {age_s:.1f} s, the limit is watchdog_s={limit_s:g}"
            )

    def _work(self, piece: Piece) -> PieceWork:
        """What the runner needs of a piece; a scratch run counts its pages from 0."""
        prepared, request = piece.entry.prepared, piece.entry.request
        reservation = piece.reservation
        assert prepared is not None
        if reservation is None:
            num_pages = -(-piece.shape.stop // self._config.cache.page_size)
            block_table = np.arange(num_pages, dtype=np.int32)
        else:
            block_table = reservation.block_table
        return PieceWork(
            prepared=prepared,
            start=piece.shape.start,
            stop=piece.shape.stop,
            suffix=piece.shape.suffix,
            block_table=block_table,
            onload=_onload(piece),
            task=request.task,
            top_k=request.top_k,
            wants_user_embedding=request.return_user_embedding,
        )

    def _may_start(self, piece: Piece) -> bool:
        """Drop what was given up since it was planned."""
        entry = piece.entry
        if entry.state is State.PLANNED and entry.is_expired(self._clock()):
            self._drop_late(entry, "launch")
        if entry.state is not State.ABANDONED:
            return True
        if piece.reservation is not None:
            self._manager.release(piece.reservation, onload_failed=False)
        job = _onload(piece)
        if job is not None:
            self._meter.onload_dropped(job)
        self._end(entry, Event.RELEASE)
        return False

    # What has ended

    def _collect_copies(self) -> bool:
        events = self._copies.poll()
        for progress in events:
            self._note_copy(progress)
            self._manager.copy_progress(progress)
        return self._finish_moves() or bool(events)

    def _note_copy(self, progress: CopyProgress) -> None:
        if not progress.is_finished:
            return
        direction = progress.job.direction.value
        if progress.error is not None:
            _logger.warning("%s of %d pages failed: %s", direction, progress.job.num_pages,
                            progress.error)  # fmt: skip
        self._meter.onload_ended(progress.job)

    def _finish_moves(self) -> bool:
        """Settle moves whose copies have ended, failed or come too late."""
        latest_start_s = self._clock() - self._config.transfer.copy_timeout_s
        waiting: list[Piece] = []
        ended: list[Piece] = []
        for piece in self._moves:
            job = _onload(piece)
            is_over = job is None or job.succeeded is not None or job.started_s < latest_start_s
            (ended if is_over else waiting).append(piece)
        self._moves = waiting
        for piece in ended:
            job = _onload(piece)
            if job is not None:
                self._meter.onloads_used([job], 0.0)
            self._settle(piece, has_failed=job is not None and job.succeeded is not True)
        return bool(ended)

    def _finish_step(self, step: StepPlan, result: StepResult) -> None:
        """Answers first, then the bookkeeping that nobody waits for."""
        self._trace("run_end", step.number)
        onloads = [job for piece in step.pieces if (job := _onload(piece)) is not None]
        self._meter.step_ended(step, result, onloads)
        step.version.cost.observe(
            step.num_rows, step.num_pairs, result.run_s - result.onload_wait_s
        )
        for piece, part in zip(step.pieces, result.pieces, strict=True):
            if not part.copy_failed:
                _merge(piece, part)
                piece.entry.answer.run_s += result.run_s
                piece.entry.answer.onload_wait_s += result.onload_wait_s
                if piece.is_last and piece.entry.state is State.RUNNING:
                    self._emit_response(piece.entry)
        for piece, part in zip(step.pieces, result.pieces, strict=True):
            self._settle(piece, has_failed=part.copy_failed)
        self._trace("commit", step.number)

    def _settle(self, piece: Piece, *, has_failed: bool) -> None:
        """Commit or release a piece's pages, and send its request on its way."""
        entry = piece.entry
        if piece.reservation is not None:
            if has_failed:
                self._manager.release(piece.reservation, onload_failed=True)
            else:
                job = self._manager.commit(piece.reservation)
                if job is not None:
                    self._submit_copy(job, self._clock())
        if entry.state is State.ABANDONED:
            self._end(entry, Event.RELEASE)
        elif has_failed and entry.prepared is not None:
            entry.forget_hits()
            entry.is_retry = True
            self._requeue(entry)
        elif piece.is_last:
            self._answer(entry, Event.ANSWER)
        else:
            self._requeue(entry)

    def _requeue(self, entry: ScheduledRequest) -> None:
        entry.fire(Event.REQUEUE)
        if entry.is_forgotten:
            entry.make_transient()
        self._has_news = True
        self._queue.put(entry)
        if self._is_own(entry) and len(self._queue.unfinished_of(entry.line)) > 1:
            self._step_aside(entry)

    # Ends of requests

    def _expire(self) -> bool:
        now_s = self._clock()
        expired = [entry for entry in self._queue if entry.is_expired(now_s)]
        for entry in expired:
            self._drop_late(entry, "queue")
        return bool(expired)

    def _drop_late(self, entry: ScheduledRequest, stage: str) -> None:
        self.metrics.add("deadline_drops_total", 1, stage)
        self.give_up(
            entry, DeadlineExceeded(f"the deadline passed before the request ran (in {stage})")
        )

    def give_up(self, entry: ScheduledRequest, error: EngineError) -> None:
        """Answer with an error; pages held by a step are let go when the step ends."""
        if entry.state is State.ABANDONED or entry.is_answered:
            return
        if entry.state is State.WAITING:
            self._queue.take(entry)
            self._emit_error(entry.request, error)
            self._end(entry, Event.ANSWER)
            return
        self._emit_error(entry.request, error)
        entry.fire(Event.ABANDON)

    def _answer(self, entry: ScheduledRequest, event: Event) -> None:
        if not entry.is_answered:
            self._emit_response(entry)
        self._end(entry, event)

    def _end(self, entry: ScheduledRequest, event: Event) -> None:
        """The request has its outcome and holds nothing any more."""
        entry.fire(event)
        self._has_news = True
        self._queue.finish(entry)
        del self._live[entry.request.request_id]
        entry.version.num_bound -= 1
        if entry.is_transient:
            self._manager.drop(entry.key)

    def _emit_error(self, request: Request, error: EngineError) -> None:
        self.metrics.add("requests_total", 1, request.task.value, error.code)
        self._emit(Outcome(request_id=request.request_id, error=to_record(error)))

    def _emit_response(self, entry: ScheduledRequest) -> None:
        entry.is_answered = True
        resident_tokens = 0
        if entry.prepared is None:
            view = self._manager.user(entry.key)
            resident_tokens = 0 if view is None else view.device_len
        now_s = self._clock()
        response = self._answers.response(entry, resident_tokens, now_s)
        self._emit(Outcome(request_id=response.request_id, response=response))
        self._meter.answered(entry.admitted_s, now_s)

    def _emit(self, outcome: Outcome) -> None:
        listener = self._own.pop(outcome.request_id, None)
        if listener is None:
            self._outbox.append(outcome)
        else:
            listener(outcome)

    def _trace(self, kind: str, step_number: int) -> None:
        if self._observer is not None:
            self._observer(TraceEvent(kind, step_number, self._clock()))


def _onload(piece: Piece) -> CopyJob | None:
    """The transfer the piece waits for."""
    return None if piece.reservation is None else piece.reservation.onload


def _merge(piece: Piece, result: PieceResult) -> None:
    """Add a piece's values to its request's answer."""
    entry, answer = piece.entry, piece.entry.answer
    assert entry.prepared is not None
    if result.scores is not None:
        answer.scores.append(result.scores)
    if result.user_embedding is not None:
        answer.user_embedding = result.user_embedding
    if result.items is not None:
        answer.items, answer.item_scores = result.items, result.item_scores
    if len(piece.shape.suffix):
        entry.suffix_done += len(piece.shape.suffix) - entry.prepared.num_fixed_suffix
