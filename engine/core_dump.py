"""What a core is doing, as text: for the log, when something has gone wrong.

Requests are named by their ids, users only on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.block_manager.reservation import PoolUsage
from engine.scheduler.pieces import Piece, StepPlan
from engine.scheduler.request import ScheduledRequest
from engine.transfer.jobs import CopyJob

_MAX_LINES = 50
_MAX_PAGES = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoreState:
    """A core at one moment; nothing in it is modified.

    Attributes:
        now_s: Monotonic seconds, as all times here.
        refusal: Why new requests are refused; None when they are taken.
        unfinished: All requests without an outcome, or that hold something.
        num_waiting: Of them, those in the queue.
        running, running_since_s: The step on the device.
        upcoming: The step that is being planned.
        moves: Pieces that only wait for their copy.
        copies: Jobs that may touch bytes.
        num_commands: Commands that have not been answered.
    """

    now_s: float
    refusal: str | None
    unfinished: Sequence[ScheduledRequest]
    num_waiting: int
    running: StepPlan | None
    running_since_s: float
    upcoming: StepPlan | None
    moves: Sequence[Piece]
    copies: Sequence[CopyJob]
    usage: PoolUsage
    num_commands: int


def describe_core(state: CoreState, *, names_users: bool) -> str:
    """The state in lines; long lists are cut and say so. No user data unless `names_users`."""
    return "\n".join(_lines(state, names_users))


def _lines(state: CoreState, names_users: bool) -> Iterator[str]:
    num_running = len(state.unfinished) - state.num_waiting
    yield (
        f"core at {state.now_s:.3f} s: {state.num_waiting} requests wait, {num_running} are in "
        f"steps, {state.num_commands} commands are open, new requests are "
        + ("taken" if state.refusal is None else f"refused ({state.refusal})")
    )
    if state.running is None:
        yield "running step: none"
    else:
        age_s = state.now_s - state.running_since_s
        yield f"running step: {_step(state.running)}, for {age_s:.3f} s"
        yield from _cut(_piece(piece, names_users) for piece in state.running.pieces)
    if state.upcoming is None:
        yield "upcoming step: none"
    else:
        yield f"upcoming step: {_step(state.upcoming)}"
        yield from _cut(_piece(piece, names_users) for piece in state.upcoming.pieces)
    yield f"moves: {len(state.moves)}"
    yield from _cut(_piece(piece, names_users) for piece in state.moves)
    yield f"copies in flight: {len(state.copies)}"
    yield from _cut(_copy(job, state.now_s) for job in state.copies)
    usage = state.usage
    yield (
        f"pages: {usage.pages_used} of {usage.num_pages} used; chunks: {usage.chunks_used} of "
        f"{usage.num_chunks} used; users: {usage.num_users}, {usage.num_leaving} leaving; "
        f"reservations: {usage.num_reservations}"
    )
    yield f"unfinished requests: {len(state.unfinished)}"
    yield from _cut(_request(entry, state.now_s, names_users) for entry in state.unfinished)


def _cut(lines: Iterable[str]) -> Iterator[str]:
    """The lines, indented, and how many were left out."""
    num_left_out = 0
    for number, line in enumerate(lines):
        if number < _MAX_LINES:
            yield f"  {line}"
        else:
            num_left_out += 1
    if num_left_out:
        yield f"  and {num_left_out} more"


def _step(step: StepPlan) -> str:
    marks = "".join(
        f", {mark}" for mark, is_set in (("scratch", step.is_scratch), ("uncut", step.is_uncut))
        if is_set
    )  # fmt: skip
    return (
        f"number {step.number}, weights {step.version.name}, {len(step.pieces)} pieces, "
        f"{step.num_rows} rows, {step.num_pairs} pairs, {step.onload_bytes} onload bytes{marks}"
    )


def _piece(piece: Piece, names_users: bool) -> str:
    shape, reservation = piece.shape, piece.reservation
    pages = "scratch pages"
    onload = ""
    if reservation is not None:
        pages = f"pages {_ids(reservation.block_table.tolist())}"
        if reservation.onload is not None:
            onload = f", onload job {reservation.onload.handle}"
    return (
        f"{_name(piece.entry, names_users)}: rows [{shape.start}, {shape.stop}), "
        f"{len(shape.suffix)} suffix rows, {pages}{onload}"
    )


def _copy(job: CopyJob, now_s: float) -> str:
    age = "not started" if job.handle < 0 else f"{now_s - job.started_s:.3f} s old"
    return (
        f"{job.direction.value} job {job.handle}: {age}, {job.num_pages} pages from page "
        f"{job.first_page} of branch {job.branch}, device pages {_ids(job.pages.tolist())}"
    )


def _request(entry: ScheduledRequest, now_s: float, names_users: bool) -> str:
    return (
        f"{_name(entry, names_users)}: {entry.state.value}, admitted "
        f"{now_s - entry.admitted_s:.3f} s ago, {entry.num_tokens} tokens, weights "
        f"{entry.version.name}"
    )


def _name(entry: ScheduledRequest, names_users: bool) -> str:
    request = entry.request
    name = f"{request.task.value} {request.request_id!r}"
    return f"{name} of {request.namespace}/{request.user_id}" if names_users else name


def _ids(ids: Sequence[int]) -> str:
    shown = " ".join(map(str, ids[:_MAX_PAGES]))
    return f"[{shown} and {len(ids) - _MAX_PAGES} more]" if len(ids) > _MAX_PAGES else f"[{shown}]"
