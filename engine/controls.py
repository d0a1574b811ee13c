"""Commands under way in a core: each is carried out at once as far as it can be, and answered when
it is complete.

The core calls `poll` in every pass. What a command waits for (pages that a step still reads, a
model that is being loaded, the end of requests) never holds up a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from engine.block_manager.manager import BlockManager
from engine.commands import (
    ActivateWeights,
    CacheReset,
    Command,
    CoreMessage,
    DescribeUser,
    ForgetUser,
    Forgotten,
    ListUsers,
    ListWeights,
    LoadCatalogue,
    LoadWeights,
    QueryStats,
    Reply,
    ResetCache,
    Result,
    RetireWeights,
    Statistics,
)
from engine.errors import EngineError, to_record
from engine.scheduler.request import ScheduledRequest
from engine.types import CoreStats
from engine.user_reports import describe_user, list_users
from engine.weights.changes import WeightsChanges
from engine.weights.versions import Versions

Attempt = Callable[[], Result | None]
"""The result once the command is complete, None before; raises the EngineError that ended it."""


class ControlledCore(Protocol):
    """What commands need of the core."""

    def stats(self) -> CoreStats: ...

    def unfinished(self) -> Iterable[ScheduledRequest]: ...


class _Open(NamedTuple):
    """A command that is not complete."""

    ticket: str
    attempt: Attempt


class Controls:
    """Owned by the core thread; puts replies into the core's outbox."""

    def __init__(
        self,
        core: ControlledCore,
        manager: BlockManager,
        versions: Versions,
        changes: WeightsChanges,
        outbox: list[CoreMessage],
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._manager = manager
        self._versions = versions
        self._changes = changes
        self._outbox = outbox
        self._clock = clock
        self._open: list[_Open] = []
        self._announced = versions.served

    @property
    def is_idle(self) -> bool:
        return not self._open

    @property
    def num_open(self) -> int:
        """Commands that are not answered yet."""
        return len(self._open)

    def run(self, ticket: str, command: Command) -> None:
        """Start a command; what ends at once is answered at once."""
        try:
            waiting = _Open(ticket, self._start(command))
        except EngineError as error:
            self._outbox.append(Reply(ticket=ticket, error=to_record(error)))
            return
        if not self._try(waiting):
            self._open.append(waiting)

    def poll(self) -> bool:
        """Answer what is complete by now; whether anything was."""
        if not self._open:
            return False
        still_open = [waiting for waiting in self._open if not self._try(waiting)]
        has_progress = len(still_open) < len(self._open)
        self._open = still_open
        return has_progress

    def abort(self, error: EngineError) -> None:
        """Answer every open command with the error."""
        for waiting in self._open:
            self._outbox.append(Reply(ticket=waiting.ticket, error=to_record(error)))
        self._open.clear()

    def _try(self, waiting: _Open) -> bool:
        try:
            result = waiting.attempt()
        except EngineError as error:
            self._outbox.append(Reply(ticket=waiting.ticket, error=to_record(error)))
            return True
        if result is None:
            return False
        self._outbox.append(Reply(ticket=waiting.ticket, result=result))
        return True

    def _start(self, command: Command) -> Attempt:
        match command:
            case QueryStats():
                return lambda: Statistics(stats=self._core.stats())
            case ForgetUser():
                return self._forget(command)
            case DescribeUser():
                return lambda: describe_user(command, self._manager, self._versions, self._clock())
            case ListUsers():
                return lambda: list_users(command, self._manager, self._clock())
            case ResetCache():
                return self._reset()
            case LoadWeights():
                return self._announcing(self._changes.load(command))
            case ActivateWeights():
                return self._announcing(self._changes.activate(command))
            case RetireWeights():
                return self._announcing(self._changes.retire(command))
            case ListWeights():
                return self._changes.list
            case LoadCatalogue():
                return self._announcing(self._changes.load_catalogue(command))

    def _forget(self, command: ForgetUser) -> Attempt:
        user = (command.namespace, command.user_id)
        self._changes.forget(*user)
        _leave_states(entry for entry in self._core.unfinished() if entry.line[:2] == user)
        ticket = self._manager.forget(user)
        removed = Forgotten(device_tokens=ticket.device_tokens, host_tokens=ticket.host_tokens)
        return lambda: removed if ticket.is_done() else None

    def _reset(self) -> Attempt:
        self._changes.forget_all()
        _leave_states(self._core.unfinished())
        ticket = self._manager.reset()
        removed = CacheReset(
            states=ticket.num_found,
            device_tokens=ticket.device_tokens,
            host_tokens=ticket.host_tokens,
        )
        return lambda: removed if ticket.is_done() else None

    def _announcing(self, attempt: Attempt) -> Attempt:
        """The same, and what requests may name is said as soon as it changes, and before the
        reply."""

        def announce() -> Result | None:
            result = attempt()
            served = self._versions.served
            if result is not None or served != self._announced:
                self._announced = served
                self._outbox.append(served)
            return result

        return announce


def _leave_states(entries: Iterable[ScheduledRequest]) -> None:
    """Requests that came before their users' state was removed share no state any more."""
    for entry in entries:
        if entry.prepared is not None and entry.scratch_reason is None:
            entry.leave_state()
