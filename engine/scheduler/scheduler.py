"""Step plans: which pieces run together, and on which pages.

`plan` walks the queue in order and takes one piece of each request that may go, until a budget is
full. Look-up and reservation of a piece are one act, so what a plan counts on is there when it
runs. A step runs one weights version: that of its first piece. A plan may be made while another
step runs: it takes free pages, or evicts users of neither step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from engine.block_manager.manager import BlockManager
from engine.block_manager.reservation import Lookup
from engine.block_manager.user_state import UserKey
from engine.config import SchedulerConfig
from engine.errors import HistoryNeeded
from engine.models.base import PreparedRequest
from engine.scheduler.delta import history_needed
from engine.scheduler.life import Event
from engine.scheduler.pieces import (
    NO_SUFFIX,
    Piece,
    PieceShape,
    StepPlan,
    ends_request,
    shape_piece,
)
from engine.scheduler.queue import RequestQueue
from engine.scheduler.request import Line, ScheduledRequest


@dataclass(slots=True, eq=False)
class Planned:
    """What one planning pass decided.

    Attributes:
        step: The upcoming step, perhaps without pieces.
        added: Pieces this pass added to it.
        moves: Pieces without rows (prefetches whose rows all exist): only their copies run.
        settled: Prefetches that have nothing to move.
        unfit: Requests that can never fit any more: their version's share of the pool has shrunk.
        refused: Delta requests whose base is not known any more, each with what it ends with.
    """

    step: StepPlan
    added: list[Piece] = field(default_factory=list)
    moves: list[Piece] = field(default_factory=list)
    settled: list[ScheduledRequest] = field(default_factory=list)
    unfit: list[ScheduledRequest] = field(default_factory=list)
    refused: list[tuple[ScheduledRequest, HistoryNeeded]] = field(default_factory=list)


class Scheduler:
    """Makes step plans. Owned by the core thread; takes requests out of the queue it is given."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: BlockManager,
        queue: RequestQueue,
        *,
        bytes_per_token: int,
        max_onload_bytes: int = 0,
    ) -> None:
        self._config = config
        self._manager = manager
        self._queue = queue
        self._max_onload_bytes = max_onload_bytes
        self._bytes_per_token = bytes_per_token
        self._num_plans = 0

    def plan(
        self, now_s: float, in_flight: Collection[ScheduledRequest], upcoming: StepPlan | None
    ) -> Planned:
        """Fill the upcoming step (None: a new one) beside the requests `in_flight`, whose users
        are left alone."""
        if upcoming is None:
            self._num_plans += 1
            upcoming = StepPlan(number=self._num_plans)
        planned = Planned(upcoming)
        held = [*in_flight, *(piece.entry for piece in upcoming.pieces)]
        busy = {entry.line for entry in held}
        protected = [entry.key for entry in held]
        blocked: set[str] = set()
        for entry in list(self._queue):
            if upcoming.is_closed:
                break
            if not self._may_go(entry, upcoming, busy, blocked):
                continue
            had_to_wait = entry.was_passed_over
            piece = self._plan_piece(entry, planned, protected)
            if piece is not None:
                busy.add(entry.line)
                protected.append(entry.key)
                self._take(entry, now_s)
            elif had_to_wait:
                blocked.add(entry.version.name)
        return planned

    def _may_go(
        self,
        entry: ScheduledRequest,
        upcoming: StepPlan,
        busy: Collection[Line],
        blocked: Collection[str],
    ) -> bool:
        """It is the first of its line, which has no piece in flight; its version is the step's;
        and where an older request, passed over once before, lacks space again, it is not of that
        request's version, nor of one that uses more than its quota: pieces of such a version would
        hold the pages that are missing, step after step."""
        if entry.line in busy or not self._queue.is_first_in_line(entry):
            return False
        if upcoming.pieces and upcoming.version is not entry.version:
            return False
        version = entry.version.name
        return not blocked or (version not in blocked and not self._manager.is_above_quota(version))

    def _take(self, entry: ScheduledRequest, now_s: float) -> None:
        self._queue.take(entry)
        entry.fire(Event.PLAN)
        if entry.first_planned_s is None:
            entry.first_planned_s = now_s

    def _plan_piece(
        self, entry: ScheduledRequest, planned: Planned, protected: list[UserKey]
    ) -> Piece | None:
        """A piece for the step, or None: another step (if space lacked, it is marked so)."""
        if entry.prepared is None:
            return self._plan_resident_prefetch(entry, planned)
        if entry.scratch_reason is not None:
            return self._plan_scratch(entry, entry.prepared, planned)
        return self._plan_cached(entry, entry.prepared, planned, protected)

    def _plan_resident_prefetch(self, entry: ScheduledRequest, planned: Planned) -> Piece | None:
        """Bring what the host has into free pages; it never waits and never evicts."""
        page_bytes = self._manager.page_size * self._bytes_per_token
        max_pages = self._max_onload_bytes // page_bytes or self._manager.num_pages
        reservation = self._manager.reserve_resident(entry.key, max_pages=max_pages)
        if reservation is None:
            planned.settled.append(entry)
            return None
        shape = PieceShape(reservation.stop, reservation.stop, NO_SUFFIX)
        piece = Piece(entry=entry, shape=shape, reservation=reservation, is_last=True)
        planned.moves.append(piece)
        return piece

    def _plan_scratch(
        self, entry: ScheduledRequest, prepared: PreparedRequest, planned: Planned
    ) -> Piece | None:
        if planned.step.pieces:
            return None
        shape = shape_piece(
            entry,
            prepared,
            start=0,
            max_rows=self._config.max_uncut_tokens,
            max_history_rows=None,
            needs_suffix=True,
        )
        assert shape is not None, "admission lets in no scratch run above max_uncut_tokens"
        entry.device_tokens = 0
        piece = Piece(entry=entry, shape=shape, reservation=None, is_last=True)
        planned.step.is_scratch = planned.step.is_uncut = planned.step.is_closed = True
        self._add(piece, prepared, planned)
        return piece

    def _plan_cached(
        self,
        entry: ScheduledRequest,
        prepared: PreparedRequest,
        planned: Planned,
        protected: list[UserKey],
    ) -> Piece | None:
        chain = entry.chain
        assert chain is not None
        if not self._manager.fits(prepared.length, entry.version.name):
            planned.unfit.append(entry)
            return None
        if entry.needs_refresh:
            self._manager.refresh(entry.key)
            entry.needs_refresh = False
        lookup = self._manager.lookup(entry.key, chain)
        if lookup.matched < prepared.base_rows:
            planned.refused.append((entry, history_needed(entry.request, prepared)))
            return None
        shape = self._shape(entry, prepared, lookup, planned.step)
        if shape is None:
            return None
        reservation = self._manager.reserve(entry.key, chain, stop=shape.stop, protected=protected)
        if reservation is None:
            entry.was_passed_over = True
            return None
        if entry.device_tokens is None:
            entry.device_tokens = lookup.device_hit
            entry.host_tokens = lookup.host_hit
        piece = Piece(
            entry=entry,
            shape=shape,
            reservation=reservation,
            is_last=ends_request(entry, prepared, shape),
        )
        if shape.num_rows == 0:
            planned.moves.append(piece)
            return piece
        if self._runs_uncut(entry, lookup):
            planned.step.is_uncut = planned.step.is_closed = True
        self._add(piece, prepared, planned)
        return piece

    def _shape(
        self, entry: ScheduledRequest, prepared: PreparedRequest, lookup: Lookup, step: StepPlan
    ) -> PieceShape | None:
        """The piece that the budgets allow, or None for another step."""
        config = self._config
        start = lookup.matched
        is_uncut = self._runs_uncut(entry, lookup) and prepared.length > start
        if is_uncut and step.pieces:
            return None
        max_rows = config.max_uncut_tokens if is_uncut else config.max_batch_tokens
        others_wait = len(self._queue) > 1
        shape = shape_piece(
            entry,
            prepared,
            start=start,
            max_rows=max_rows - step.num_rows,
            max_history_rows=(
                None
                if is_uncut or lookup.is_prefix
                else config.piece_tokens
                if others_wait
                else config.max_batch_tokens
            ),
            needs_suffix=lookup.is_prefix,
        )
        if shape is None or not step.pieces:
            return shape
        onload_bytes = step.onload_bytes + lookup.host_hit * self._bytes_per_token
        if self._max_onload_bytes and onload_bytes > self._max_onload_bytes:
            return None
        if config.max_step_ms:
            predicted_s = entry.version.cost.predict_s(
                step.num_rows + shape.num_rows,
                step.num_pairs + shape.num_pairs(prepared.length),
            )
            if predicted_s is not None and predicted_s * 1e3 > config.max_step_ms:
                return None
        return shape

    def _runs_uncut(self, entry: ScheduledRequest, lookup: Lookup) -> bool:
        """Bidirectional contextual rows must meet the whole history in one piece."""
        spec = entry.version.spec
        return spec.has_bidirectional_context and lookup.matched < spec.num_context

    def _add(self, piece: Piece, prepared: PreparedRequest, planned: Planned) -> None:
        step = planned.step
        planned.added.append(piece)
        step.pieces.append(piece)
        step.num_rows += piece.shape.num_rows
        step.num_pairs += piece.shape.num_pairs(prepared.length)
        if piece.reservation is not None and piece.reservation.onload is not None:
            pages = piece.reservation.onload.num_pages
            step.onload_bytes += pages * self._manager.page_size * self._bytes_per_token
        if (
            len(step.pieces) >= self._config.max_batch_requests
            or step.num_rows >= self._config.max_batch_tokens
        ):
            step.is_closed = True
