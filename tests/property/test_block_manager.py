"""The block manager against a small model: whatever happens, no table holds a wrong row.

There are no bytes. Every page slot and every host slot carries a tag instead: the user and the
tokens that its K/V row would be a function of. Steps and copies write tags where the engine would
write rows, also half-written and garbage ones; a block table is good when every row it promises
carries the right tag. Set BLOCK_MANAGER_EXAMPLES for a long run.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import pytest
from block_quota_shadow import QuotaShadow, Wanted, World, world_of
from block_shadow import Shadow, Tokens, chain_of, expected_match
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from engine.block_manager.manager import BlockManager
from engine.block_manager.reservation import ForgetTicket, Reservation
from engine.block_manager.user_state import UserKey
from engine.errors import InvariantError
from engine.metrics import Metrics
from engine.testing.fakes import FakeClock, ManualCopyEngine
from engine.transfer.jobs import CopyJob, Direction

LONG_RUN = int(os.environ.get("BLOCK_MANAGER_EXAMPLES", "0"))
SETTINGS = settings(
    max_examples=LONG_RUN or 200,
    stateful_step_count=100,
    derandomize=LONG_RUN == 0,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


KEYS = (
    UserKey("", "a", "v1"),
    UserKey("", "a", "v2"),
    UserKey("", "b", "v1"),
    UserKey("", "b", "v2"),
    UserKey("shop", "a", "v1"),
    UserKey("", "a", "v1", private_to=7),
)
keys = st.sampled_from([*[KEYS[0]] * 4, *KEYS])
SHARES: tuple[dict[str, float], ...] = (
    {},
    {"v1": 0.5, "v2": 0.5},
    {"v1": 0.75, "v2": 0.25},
    {"v1": 0.2, "v2": 0.4},
    {"v2": 1.0},
    {"v1": 0.6},
    {"v1": 0.35, "v2": 0.35, "v3": 0.3},
)


class Act(Enum):
    """How a user's history changes from one request to the next."""

    APPEND = "append"
    SAME = "same"
    EDIT = "edit"
    CUT = "cut"
    GO_BACK = "go back"


class Step(Enum):
    """What happens when all goes well."""

    PLAN = "plan"
    SERVE = "serve"
    SERVE_AND_DRAIN = "serve and drain"
    COMMIT = "commit"
    EMPTY_DEVICE = "empty device"
    START_COPIES = "start copies"
    COPY = "copy"
    COPY_SOME_PAGES = "copy some pages"
    POLL = "poll"


class Trouble(Enum):
    """What else may happen."""

    ABORT = "abort"
    ABORT_AFTER_RUN = "abort after run"
    MISS = "miss"
    FAIL_COPY = "fail copy"
    PREFETCH = "prefetch"
    FORGET = "forget"
    REFRESH = "refresh"
    DROP = "drop"
    DROP_VERSION = "drop version"
    RESET = "reset"
    SET_QUOTAS = "set quotas"
    EDIT_WHILE_OFFLOADING = "edit while offloading"
    FAIL_BEFORE_THE_NEXT_OFFLOAD = "fail before the next offload"
    ABORT_WHILE_ONLOADING = "abort while onloading"


STEPS = [
    *Trouble,
    Trouble.FAIL_COPY,
    *[Trouble.SET_QUOTAS] * 3,
    *[step for step in Step for _ in range(2)],
    *[Step.SERVE] * 2,
    *[Step.SERVE_AND_DRAIN] * 4,
    *[Step.START_COPIES] * 2,
]
acts = st.sampled_from([*[Act.APPEND] * 4, *[Act.SAME] * 2, Act.EDIT, *Act])


class Piece(NamedTuple):
    """An open reservation and the history it belongs to."""

    reservation: Reservation
    history: Tokens


class BlockManagerMachine(RuleBasedStateMachine):
    """Requests, copies and removals in any order, on tiny pools."""

    @initialize(
        num_pages=st.integers(2, 10),
        page_size=st.integers(1, 4),
        num_chunks=st.integers(0, 6),
        pages_per_chunk=st.integers(1, 3),
        shares=st.sampled_from([*[SHARES[0]] * 5, *SHARES]),
    )
    def build(
        self,
        num_pages: int,
        page_size: int,
        num_chunks: int,
        pages_per_chunk: int,
        shares: dict[str, float],
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.pages_per_chunk = pages_per_chunk
        self.copies = ManualCopyEngine(is_automatic=False, clock=FakeClock())
        self.metrics = Metrics()
        self.shadow = Shadow(num_pages, num_chunks * pages_per_chunk, page_size)
        self.quotas = QuotaShadow(num_pages, num_chunks, page_size, pages_per_chunk)
        self.manager = BlockManager(
            num_pages=num_pages,
            page_size=page_size,
            num_chunks=num_chunks,
            pages_per_chunk=pages_per_chunk,
            copies=self.copies,
            metrics=self.metrics,
            page_bytes_all_layers=64,
            clock=FakeClock(),
            on_pages_freed=self.shadow.poison,
        )
        self.known: dict[UserKey, Tokens] = {}
        self.sent: dict[UserKey, list[Tokens]] = {}
        self.open: list[Piece] = []
        self.done: dict[CopyJob, int] = {}
        self.failed: set[CopyJob] = set()
        self.finished: set[CopyJob] = set()
        self.tickets: list[tuple[ForgetTicket, set[Reservation]]] = []
        self.next_token = 1
        self.is_broken = False
        self._set_quotas(shares)

    # One rule: hypothesis switches whole rules off at random, and a machine without requests or
    # without copies shows nothing.

    @rule(step=st.sampled_from(STEPS), key=keys, act=acts, amount=st.integers(0, 12))
    def go_on(self, step: Step | Trouble, key: UserKey, act: Act, amount: int) -> None:
        self.is_broken = True
        self._go_on(step, key, act, amount)
        self.is_broken = False

    def _go_on(self, step: Step | Trouble, key: UserKey, act: Act, amount: int) -> None:
        if isinstance(step, Trouble):
            self._disturb(step, key, amount)
        elif step is Step.PLAN:
            self._request(key, self._history(key, act, amount), amount)
        elif step in (Step.SERVE, Step.SERVE_AND_DRAIN):
            self._serve(key, act, amount)
            if step is Step.SERVE_AND_DRAIN:
                self._let_all_copies_end()
        elif step is Step.COMMIT:
            self._commit(amount)
        elif step is Step.EMPTY_DEVICE:
            self._empty_device()
        elif step is Step.START_COPIES:
            self._start_copies()
        elif step is Step.COPY:
            self._move_on(Direction.ONLOAD if amount % 2 else Direction.OFFLOAD)
        elif step is Step.COPY_SOME_PAGES:
            self._copy_some_pages(1 + amount % 3)
        elif step is Step.POLL:
            self._poll()

    def _disturb(self, trouble: Trouble, key: UserKey, which: int) -> None:
        if trouble in (Trouble.ABORT, Trouble.ABORT_AFTER_RUN):
            self._abort(which, has_run=trouble is Trouble.ABORT_AFTER_RUN)
        elif trouble is Trouble.MISS:
            self._miss(which)
        elif trouble is Trouble.FAIL_COPY:
            self._fail_copy(Direction.ONLOAD if which % 2 else Direction.OFFLOAD, which // 2)
            if which > 5:
                self._let_all_copies_end()
        elif trouble is Trouble.PREFETCH:
            self._prefetch(key, 1 + which % 4)
        elif trouble is Trouble.FORGET:
            self._forget(key)
        elif trouble is Trouble.DROP_VERSION:
            self._drop_version(key.weights_version)
        elif trouble is Trouble.RESET:
            self._reset()
        elif trouble is Trouble.SET_QUOTAS:
            self._set_quotas(SHARES[which % len(SHARES)])
        elif trouble is Trouble.EDIT_WHILE_OFFLOADING:
            self._serve(key, Act.APPEND, 1 + which)
            self._start_copies()
            self._serve(key, Act.EDIT, which)
        elif trouble is Trouble.FAIL_BEFORE_THE_NEXT_OFFLOAD:
            self._serve(key, Act.APPEND, 1 + which // 2)
            self._serve(key, Act.APPEND, 1 + which // 2)
            self._fail_copy(Direction.OFFLOAD, which % 2)
            self._move_on(Direction.OFFLOAD)
        elif trouble is Trouble.ABORT_WHILE_ONLOADING:
            self._let_all_copies_end()
            self._empty_device()
            if self._request(key, self._history(key, Act.SAME, 0), which):
                self._start_copies()
                self._abort(len(self.open) - 1, has_run=False)
        else:
            remove = self.manager.refresh if trouble is Trouble.REFRESH else self.manager.drop
            remove(key)
            assert self.manager.user(key) is None

    # Requests.

    def _serve(self, key: UserKey, act: Act, amount: int) -> None:
        """A whole request, if it can be planned now."""
        if self._request(key, self._history(key, act, amount), 99):
            self._commit(len(self.open) - 1)

    def _empty_device(self) -> None:
        """A piece that takes all pages, so that the next requests find the host only."""
        key = UserKey("", "everything", "v1")
        reservation = self._reserve(key, [0] * self.num_pages * self.page_size, 10**6)
        if reservation is not None:
            self.manager.release(reservation, onload_failed=False)
            event("emptied the device")

    def _history(self, key: UserKey, act: Act, amount: int) -> Tokens:
        earlier = self.sent.get(key) or [[]]
        history = list(earlier[-1])
        if act is Act.APPEND:
            history += self._new_tokens(amount)
            if self.manager.fits(len(history)):
                return history
            return history[: len(history) // 2]
        if act is Act.SAME:
            return history
        if act is Act.EDIT:
            if history:
                history[-1 - amount % len(history)] = self._new_tokens(1)[0]
            return history
        if act is Act.CUT:
            return history[: len(history) - amount % (len(history) + 1)]
        return list(earlier[max(0, len(earlier) - 1 - amount)])

    def _latest(self, key: UserKey) -> Tokens:
        return self.sent[key][-1] if self.sent.get(key) else []

    def _new_tokens(self, count: int) -> Tokens:
        first = self.next_token
        self.next_token += count
        return list(range(first, first + count))

    def _request(self, key: UserKey, history: Tokens, rows: int) -> bool:
        """Plan one piece of at most `rows` new rows. True: it is open."""
        pieces = [piece.reservation for piece in self.open]
        if any(other.key == key and self._is_current(other) for other in pieces):
            with pytest.raises(InvariantError, match="in flight"):
                self._reserve(key, history, len(history))
            return False
        if not self.manager.fits(len(history)):
            return False
        if self._latest(key) != history:
            self.sent.setdefault(key, []).append(history)
        known = self._known_tokens(key)
        expected = expected_match(known, history, self.page_size)
        view = self.manager.user(key)
        before = self.manager.usage()
        stop = min(len(history), expected.matched + rows)
        if expected.is_prefix:
            stop = len(history)
        assert self.manager.lookup(key, chain_of(history, key, self.page_size)).matched == (
            expected.matched
        )
        reservation = self._reserve(key, history, stop)
        if expected.diverges:
            self.known[key] = known[: expected.matched]
            event("diverged")
        if reservation is None:
            event("no space")
            after = self.manager.usage()
            assert after.num_reservations == before.num_reservations
            assert after.pages_used <= before.pages_used
            return False
        lookup = reservation.lookup
        device_len = 0 if view is None else view.device_len
        assert (lookup.matched, lookup.is_prefix) == (expected.matched, expected.is_prefix)
        assert lookup.device_hit == min(expected.matched, device_len)
        assert lookup.device_hit + lookup.host_hit == expected.matched
        assert reservation.start == min(expected.matched, stop)
        assert reservation.stop == stop
        assert len(reservation.block_table) == -(-stop // self.page_size)
        assert reservation.is_private == (expected.is_prefix and stop > expected.matched)
        self._opened(reservation, history)
        return True

    def _reserve(self, key: UserKey, history: Tokens, stop: int) -> Reservation | None:
        """Plan a piece; who gives up pages for it must be what the shadow says."""
        stop = min(stop, len(history))
        protected = {piece.reservation.key for piece in self.open}
        chain = chain_of(history, key, self.page_size)
        world, wanted = self._world(), self._wanted(key, history, stop)
        match = expected_match(self._known_tokens(key), history, self.page_size)
        if match.diverges:
            world = world.diverged(key, match.matched // self.page_size)
        reservation = self.manager.reserve(key, chain, stop=stop, protected=protected)
        expected = self.quotas.pages_after(world, wanted)
        assert (reservation is None) == (expected is None)
        if expected is None:
            expected = {other: len(held.pages) for other, held in world.states.items()}
            is_held = world.open or world.jobs
            limit = self.quotas.always_gets(key.weights_version)
            assert is_held or wanted.needed > limit, "what a version is sure of was refused"
        else:
            self.quotas.planned(key)
        views = {other: self.manager.user(other) for other in expected}
        actual = {other: view.num_pages if view else 0 for other, view in views.items()}
        assert actual == expected
        return reservation

    def _wanted(self, key: UserKey, history: Tokens, stop: int) -> Wanted:
        match = expected_match(self._known_tokens(key), history, self.page_size)
        start = min(match.matched, stop)
        return Wanted(key, kept=-(-start // self.page_size), needed=-(-stop // self.page_size))

    def _world(self) -> World:
        return world_of(
            self.manager._tiers.states,
            [piece.reservation for piece in self.open],
            self._in_flight(),
            self.copies.queued,
        )

    def _opened(self, reservation: Reservation, history: Tokens) -> None:
        self.open.append(Piece(reservation, history))
        if reservation.onload is not None:
            self._submit(reservation.onload)
            event("onload")

    def _prefetch(self, key: UserKey, max_pages: int) -> None:
        free = self.manager.usage().pages_free
        reservation = self.manager.reserve_resident(key, max_pages=max_pages)
        if reservation is not None:
            assert reservation.onload is not None
            assert reservation.onload.num_pages <= min(free, max_pages)
            assert reservation.start == reservation.stop
            self.quotas.planned(key)
            self._opened(reservation, list(self._known_tokens(key)))

    # The ends of pieces.

    def _commit(self, which: int) -> None:
        piece = self._take_ready(which)
        if piece is None:
            return
        self._run(piece)
        reservation = piece.reservation
        key = reservation.key
        is_current = self._is_current(reservation)
        known = self._known_tokens(key)
        world = self._world()
        offload = self.manager.commit(reservation)
        self._check_chunks(world, key, is_current=is_current)
        if not is_current:
            assert offload is None, "a forgotten user's rows were handed to offload"
            event("commit of a detached state")
        elif not reservation.is_private:
            known += piece.history[len(known) : reservation.stop]
        if offload is not None:
            self._submit(offload)
        with pytest.raises(InvariantError, match="ended twice"):
            self.manager.commit(reservation)

    def _check_chunks(self, world: World, key: UserKey, *, is_current: bool) -> None:
        """After a commit: who gave up chunks must be what the shadow says."""
        view = self.manager.user(key)
        expected = {other: len(held.chunks) for other, held in world.states.items()}
        if is_current:
            expected = self.quotas.chunks_after(world, key, view.device_len if view else 0)
        views = {other: self.manager.user(other) for other in expected}
        actual = {other: view.num_chunks if view else 0 for other, view in views.items()}
        assert actual == expected

    def _abort(self, which: int, *, has_run: bool) -> None:
        """A piece is dropped before its step, or its step fails after writing its rows."""
        if has_run:
            piece = self._take_ready(which)
            if piece is None:
                return
            self._run(piece)
        elif not self.open:
            return
        else:
            piece = self.open.pop(which % len(self.open))
        self.manager.release(piece.reservation, onload_failed=False)
        event("abort")

    def _miss(self, which: int) -> None:
        """An onload failed, or did not come in time; the job may go on."""
        pieces = [piece for piece in self.open if piece.reservation.onload is not None]
        if not pieces:
            return
        piece = pieces[which % len(pieces)]
        self.open.remove(piece)
        job = piece.reservation.onload
        assert job is not None
        self._write_rows(piece, is_garbage=True)
        self.manager.release(piece.reservation, onload_failed=True)
        view = self.manager.user(piece.reservation.key)
        if view is not None and piece.reservation.state.is_attached:
            assert view.host_len <= job.first_page * self.page_size
        event("failed or late onload")

    def _is_current(self, reservation: Reservation) -> bool:
        return self.manager._tiers.states.get(reservation.key) is reservation.state

    def _take_ready(self, which: int) -> Piece | None:
        """An open piece whose onload, if any, is brought to its end."""
        if not self.open:
            return None
        piece = self.open[which % len(self.open)]
        job = piece.reservation.onload
        if job is not None:
            while job not in self.finished and job not in self.failed:
                self._move_on(Direction.ONLOAD)
            if job in self.failed:
                return None
        self.open.remove(piece)
        return piece

    def _run(self, piece: Piece) -> None:
        """The step: every row it reads must be right, and it writes only what nobody touches."""
        reservation = piece.reservation
        touched = {int(page) for job in self._in_flight() for page in job.pages}
        first = reservation.start // self.page_size
        if reservation.start < reservation.stop:
            written = {int(page) for page in reservation.block_table[first:]}
            assert not written & touched, "a step writes a page that a copy touches"
        self._check_rows(piece, reservation.start)
        self._write_rows(piece, is_garbage=False)
        self._check_rows(piece, reservation.stop)

    def _write_rows(self, piece: Piece, *, is_garbage: bool) -> None:
        reservation = piece.reservation
        for i in range(reservation.start, reservation.stop):
            tag = (reservation.key, (-1,) if is_garbage else tuple(piece.history[: i + 1]))
            self.shadow.write_row(reservation.block_table, i, tag)

    def _check_rows(self, piece: Piece, end: int) -> None:
        reservation = piece.reservation
        for i in range(end):
            tag = self.shadow.row(reservation.block_table, i)
            assert tag == (reservation.key, tuple(piece.history[: i + 1])), f"row {i} is {tag}"

    # Copies: one worker a direction, jobs in order; news may come late.

    def _submit(self, job: CopyJob) -> None:
        self.copies.submit(job)
        self.done[job] = 0

    def _in_flight(self) -> list[CopyJob]:
        """Jobs that may touch bytes, or whose end the manager has not heard of."""
        live = {*self.copies.queued, *self.copies.started, *self.finished, *self.failed}
        return [job for job in self.done if job in live]

    def _current(self, direction: Direction) -> CopyJob | None:
        return next((job for job in self.copies.started if job.direction is direction), None)

    def _start_copies(self) -> None:
        for direction in Direction:
            if self._current(direction) is None:
                self._move_on(direction)

    def _move_on(self, direction: Direction) -> None:
        """The worker of a direction starts its next job, or ends the one it has."""
        job = self._current(direction)
        if job is None:
            queue = deque(job for job in self.copies.queued if job.direction is direction)
            if queue:
                self.shadow.start(queue[0])
                self.copies.start(queue[0])
            return
        self.shadow.copy(job, self.done[job], job.num_pages)
        self.copies.finish(job)
        self.finished.add(job)

    def _copy_some_pages(self, pages: int) -> None:
        job = self._current(Direction.OFFLOAD)
        if job is not None and self.done[job] + pages < job.num_pages:
            self.shadow.copy(job, self.done[job], self.done[job] + pages)
            self.done[job] += pages
            self.copies.advance(job, self.done[job])
            event("offload in part")

    def _fail_copy(self, direction: Direction, pages: int) -> None:
        if self._current(direction) is None:
            self._move_on(direction)
        job = self._current(direction)
        if job is None:
            return
        if direction is Direction.OFFLOAD:
            pages_done = max(self.done[job], min(job.num_pages - 1, self.done[job] + pages))
            self.shadow.copy(job, self.done[job], pages_done)
        else:
            pages_done = 0
        self.copies.fail(job, pages_done=pages_done)
        self.failed.add(job)
        event(f"failed {direction.value}")

    def _poll(self) -> None:
        for progress in self.copies.poll():
            self.manager.copy_progress(progress)
            if progress.is_finished:
                del self.done[progress.job]

    def _let_all_copies_end(self) -> None:
        while self.copies.queued or self.copies.started:
            self._move_on(Direction.ONLOAD)
            self._move_on(Direction.OFFLOAD)
        self._poll()

    # Removals.

    def _set_quotas(self, shares: dict[str, float]) -> None:
        before = self._world()
        self.manager.set_quotas(shares)
        self.quotas.shares = shares
        assert self._world() == before, "setting quotas takes nothing"
        event("quotas" if shares else "no quotas")

    def _forget(self, key: UserKey) -> None:
        keys = [other for other in KEYS if other[:2] == key[:2]]
        self._remove(keys, lambda: self.manager.forget(key[:2]))

    def _drop_version(self, version: str) -> None:
        keys = [other for other in KEYS if other.weights_version == version]
        self._remove(keys, lambda: self.manager.drop_version(version))

    def _reset(self) -> None:
        self._remove(KEYS, self.manager.reset)
        assert self.manager.usage().num_users == 0

    def _remove(self, keys: Sequence[UserKey], act: Callable[[], ForgetTicket]) -> None:
        views = [view for key in keys if (view := self.manager.user(key)) is not None]
        others = {key: self.manager.user(key) for key in KEYS if key not in keys}
        ticket = act()
        assert ticket.device_tokens == sum(view.device_len for view in views)
        assert ticket.host_tokens == sum(view.host_len for view in views)
        assert all(self.manager.user(key) is None for key in keys)
        assert {key: self.manager.user(key) for key in others} == others
        holders = {piece.reservation for piece in self.open if piece.reservation.key in keys}
        self.tickets.append((ticket, holders))

    # What must hold after every rule.

    @invariant()
    def bookkeeping_adds_up(self) -> None:
        if not hasattr(self, "manager"):
            return
        assert self.manager.usage().num_copies == len(self._in_flight())
        self.manager.check_invariants(idle=False)

    @invariant()
    def every_promised_row_is_right(self) -> None:
        if not hasattr(self, "manager"):
            return
        for key in KEYS:
            self._known_tokens(key)
        for key, state in self.manager._tiers.states.items():
            known = self._known_tokens(key)
            if known:
                fingerprint = chain_of(known, key, self.page_size).at(len(known))
                view = self.manager.user(key)
                assert view is not None
                assert view.fingerprint == fingerprint
            for i in range(state.device_len):
                tag = self.shadow.row(state.pages, i)
                assert tag == (key, tuple(known[: i + 1])), f"device row {i} of {key} is {tag}"
            for i in range(state.host_len):
                page, offset = divmod(i, self.page_size)
                chunk, within = divmod(page, self.pages_per_chunk)
                slot = int(state.chunks[chunk]) * self.pages_per_chunk + within
                tag = self.shadow.host[slot][offset]
                assert tag == (key, tuple(known[: i + 1])), f"host row {i} of {key} is {tag}"

    @invariant()
    def users_are_listed_and_counted(self) -> None:
        if not hasattr(self, "manager"):
            return
        world = self._world()
        found = [key for key in reversed(self.quotas.order) if key in world.states]
        users = [UserKey(*user[:3]) for user in self.manager.users(99)]
        assert users == [key for key in found if not key.private_to]
        versions = self.manager.usage().by_version
        pages = {entry.version: entry.pages_used for entry in versions if entry.pages_used}
        chunks = {entry.version: entry.chunks_used for entry in versions if entry.chunks_used}
        assert pages == self.quotas.pages_by_version(world)
        assert chunks == self.quotas.chunks_by_version(world)
        for entry in versions:
            assert entry.quota_pages == self.quotas.page_quota(entry.version)
            assert entry.quota_chunks == self.quotas.chunk_quota(entry.version)

    @invariant()
    def forgets_end_when_nothing_touches_the_bytes(self) -> None:
        if not hasattr(self, "manager"):
            return
        for ticket, holders in self.tickets:
            held = any(piece.reservation in holders for piece in self.open)
            copying = any(job.owner in ticket.states for job in self._in_flight())
            assert ticket.is_done() == (not held and not copying)

    def _known_tokens(self, key: UserKey) -> Tokens:
        """The tokens of the state: what was committed, as far as any tier still has it."""
        view = self.manager.user(key)
        known = self.known.setdefault(key, [])
        del known[view.length if view else 0 :]
        return known

    def teardown(self) -> None:
        """Everything ends; nothing may be left behind (unless a step has failed already)."""
        if not hasattr(self, "manager") or self.is_broken:
            return
        self._let_all_copies_end()
        while self.open:
            self.manager.release(self.open.pop().reservation, onload_failed=False)
        self.manager.check_invariants(idle=True)
        self.every_promised_row_is_right()
        for key in KEYS:
            assert self.manager.forget(key[:2]).is_done()
        usage = self.manager.usage()
        assert (usage.pages_used, usage.chunks_used, usage.num_users) == (0, 0, 0)
        for entry in usage.by_version:
            assert (entry.pages_used, entry.chunks_used, entry.num_users) == (0, 0, 0)


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = SETTINGS
