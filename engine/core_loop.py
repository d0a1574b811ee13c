"""The core's loop: messages in, `step`, answers out, a heartbeat.

One thread owns the core: the main thread of a core process, or a thread of the host. Nothing in
the loop blocks (layers run on a device thread, copies in workers), so a heartbeat's age tells
whether the core is alive even when it is busy.
"""

from __future__ import annotations

import logging
import select
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.commands import Command, CoreMessage, Reply, ServedWeights
from engine.config import EngineConfig
from engine.core_watch import thread_stacks
from engine.errors import Draining, EngineDead, EngineError, InvariantError, to_record
from engine.ipc import (
    Cancel,
    CoreSocket,
    Done,
    Drain,
    Drained,
    Fatal,
    Heartbeat,
    Outcomes,
    Ready,
    Run,
    Shutdown,
    Start,
    Submit,
    ToCore,
    WeightsChanged,
)
from engine.types import CoreStats, Outcome, Request

HEARTBEAT_S = 0.2
EXIT_START_FAILED = 1
EXIT_BUG = 70
EXIT_ORPHAN = 71

_LAST_WORDS_S = 2.0

log = logging.getLogger("engine.core_loop")


class WakeFace(Protocol):
    """What the loop needs of `platforms.cpu.Wake`."""

    def fileno(self) -> int: ...

    def clear(self) -> None: ...


class CoreFace(Protocol):
    """What the loop needs of `EngineCore`; see there."""

    @property
    def served(self) -> ServedWeights: ...

    @property
    def wake(self) -> WakeFace: ...

    @property
    def is_idle(self) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def run(self, ticket: str, command: Command) -> None: ...

    def take_outbox(self) -> list[CoreMessage]: ...

    def step(self) -> bool: ...

    def drain(self) -> None: ...

    def abort(self, error: EngineError) -> None: ...

    def close(self) -> None: ...

    def stats(self) -> CoreStats: ...

    def describe(self) -> str: ...


CoreFactory = Callable[[str | None, EngineConfig], CoreFace]


class CoreLoop:
    """Owned by the thread that calls `run`.

    Attributes:
        last_pass_s: When the loop's last pass began; another thread may read it.
    """

    def __init__(
        self,
        core_socket: CoreSocket,
        core: CoreFace,
        arrived: Sequence[ToCore] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`arrived`: what was received together with the start message."""
        self._socket = core_socket
        self._core = core
        self._arrived = list(arrived)
        self._clock = clock
        self._next_heartbeat_s = self.last_pass_s = clock()
        self._is_draining = False
        self._has_told_drained = False
        self._is_over = False
        self._watches_writing = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(core_socket.fileno(), selectors.EVENT_READ)
        self._selector.register(core.wake.fileno(), selectors.EVENT_READ)

    def run(self) -> int:
        """Serve until told to shut down; the exit status of the process."""
        try:
            self._socket.send(Ready(weights=self._core.served))
            while not self._is_over:
                self._run_pass()
            self._core.abort(Draining("the engine has been shut down"))
            self._send_outbox()
            self._core.close()
            self._socket.flush_within(_LAST_WORDS_S)
        except EOFError:
            return EXIT_ORPHAN
        except Exception as error:
            log.exception("the core has failed")
            self._fail(error)
            return EXIT_BUG
        return 0

    def close(self) -> None:
        """Stop the core's threads and close what it holds; only where the process goes on."""
        self._selector.close()
        self._core.close()

    def dump(self) -> None:
        """Log what the core is doing and where its threads stand."""
        try:
            state = self._core.describe()
        except Exception:  # whatever is broken must not hide the stacks
            log.exception("the core's state cannot be told")
            state = "the core's state cannot be told"
        log.critical("dump of the core\n%s\n%s", state, thread_stacks())

    def _run_pass(self) -> None:
        self.last_pass_s = self._clock()
        for message in self._arrived:
            self._receive(message)
            self._send_heartbeat()  # a thousand messages at once are no silence
        has_progressed = self._core.step()
        self._send_outbox()
        self._send_heartbeat()
        self._arrived = self._wait(has_progressed)

    def _wait(self, has_progressed: bool) -> list[ToCore]:
        timeout_s = 0.0
        if not has_progressed and not self._is_over:
            timeout_s = max(0.0, self._next_heartbeat_s - self._clock())
        self._watch_for_writing(self._socket.has_unsent)
        received: list[ToCore] = []
        for key, events in self._selector.select(timeout_s):
            if key.fd != self._socket.fileno():
                self._core.wake.clear()
                continue
            if events & selectors.EVENT_WRITE:
                self._socket.flush()
            if events & selectors.EVENT_READ:
                received = self._socket.receive()
        return received

    def _watch_for_writing(self, is_wanted: bool) -> None:
        if is_wanted != self._watches_writing:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_wanted else 0)
            self._selector.modify(self._socket.fileno(), events)
            self._watches_writing = is_wanted

    def _receive(self, message: ToCore) -> None:
        match message:
            case Submit(request=request):
                self._core.submit(request)
            case Cancel(request_id=request_id):
                self._core.cancel(request_id)
            case Run(ticket=ticket, command=command):
                self._core.run(ticket, command)
            case Drain():
                self._is_draining = True
                self._core.drain()
            case Shutdown():
                self._is_over = True
            case Start():
                raise InvariantError("a second start message")

    def _send_outbox(self) -> None:
        outcomes: list[Outcome] = []
        for message in self._core.take_outbox():
            match message:
                case Outcome():
                    outcomes.append(message)
                case Reply():
                    self._socket.send(Done(reply=message))
                case ServedWeights():
                    self._socket.send(WeightsChanged(weights=message))
        if outcomes:
            self._socket.send(Outcomes(outcomes=outcomes))
        if self._is_draining and not self._has_told_drained and self._core.is_idle:
            self._has_told_drained = True
            self._socket.send(Drained())

    def _send_heartbeat(self) -> None:
        now_s = self._clock()
        if now_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = now_s + HEARTBEAT_S
            self._socket.send(Heartbeat(sent_s=now_s, stats=self._core.stats()))

    def _fail(self, error: Exception) -> None:
        """Tell what the core was doing, answer everything that is pending, then say why the core
        ends."""
        self.dump()
        reason = f"the core has failed: {_describe(error)}"
        try:
            self._core.abort(EngineDead(reason))
            self._send_outbox()
        except Exception:
            log.exception("the core could not end its requests")
        try:
            self._socket.send(Fatal(error=to_record(EngineDead(reason))))
            self._socket.flush_within(_LAST_WORDS_S)
        except (EOFError, OSError):
            log.error("the front has gone too")


def _describe(error: Exception) -> str:
    return error.message if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


def serve_core(
    sock: socket.socket,
    build: CoreFactory,
    *,
    on_serving: Callable[[CoreLoop, EngineConfig], None] | None = None,
    process_goes_on: bool = False,
) -> int:
    """Wait for the start message, build the core and run it; the exit status.

    Args:
        on_serving: Called when the core has been built, before it says that it is ready.
        process_goes_on: Close everything at the end, also after a bug, when something may hang.
    """
    core_socket = CoreSocket(sock)
    arrived: list[ToCore] = []
    try:
        while not arrived:
            select.select([sock], [], [])
            arrived = core_socket.receive()
        start = arrived.pop(0)
        if not isinstance(start, Start):
            raise InvariantError(f"the first message is {type(start).__name__}, not Start")
        core = build(start.model_dir, start.config)
    except EOFError:
        return EXIT_ORPHAN
    except Exception as error:
        if not isinstance(error, EngineError):
            log.exception("the core could not start")
            error = EngineDead(f"the core could not start: {_describe(error)}")
        try:
            core_socket.send(Fatal(error=to_record(error)))
            core_socket.flush_within(_LAST_WORDS_S)
        except EOFError:
            return EXIT_ORPHAN
        return EXIT_START_FAILED
    loop = CoreLoop(core_socket, core, arrived)
    if on_serving is not None:
        on_serving(loop, start.config)
    try:
        return loop.run()
    finally:
        if process_goes_on:
            loop.close()
