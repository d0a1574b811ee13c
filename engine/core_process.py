"""The core in a process of its own: `python -m engine.core_process --fd N --parent PID`.

Started by module name with the same interpreter, so a host script needs no main guard. One loop
owns the core: messages in, `step`, answers out, a heartbeat. Nothing in the loop blocks (layers
run on a device thread, copies in workers), so a heartbeat's age tells whether the core is alive
even when it is busy. A second thread waits for the front's end of the socket to close, and ends
the process at once when it does: no core outlives its front, whatever either of them is doing.

Exit status: 0 after Shutdown, 1 when the core could not start, 70 after a bug, 71 without a front.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import select
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.commands import Command, CoreMessage, Reply, ServedWeights
from engine.config import EngineConfig
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
_PARENT_CHECK_S = 1.0

log = logging.getLogger("engine.core_process")


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


CoreFactory = Callable[[str | None, EngineConfig], CoreFace]


class CoreLoop:
    """Messages in, steps, answers out. Owned by the thread that calls `run`."""

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
        self._next_heartbeat_s = clock()
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
                for message in self._arrived:
                    self._receive(message)
                has_progressed = self._core.step()
                self._send_outbox()
                self._send_heartbeat()
                self._arrived = self._wait(has_progressed)
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
        """Answer everything that is pending, then say why the core ends."""
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


def watch_front(sock: socket.socket, parent_pid: int) -> None:
    """End this process as soon as the front's end of the socket is closed. Never returns."""
    poller = select.poll()
    poller.register(sock.fileno(), 0)  # hang-ups are always reported
    while os.getppid() == parent_pid:
        if poller.poll(_PARENT_CHECK_S * 1000):
            break
    os._exit(EXIT_ORPHAN)


def serve_core(sock: socket.socket, build: CoreFactory) -> int:
    """Wait for the start message, build the core and run it; the exit status."""
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
    return CoreLoop(core_socket, core, arrived).run()


def run_process(build: CoreFactory, arguments: Sequence[str] | None = None) -> int:
    """Body of a core process: parse the arguments, guard, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    parser = argparse.ArgumentParser(prog="engine.core_process", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="this end of the socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the front")
    parser.add_argument("--log-level", default="INFO")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    sock = socket.socket(fileno=options.fd)
    threading.Thread(
        target=watch_front, args=(sock, options.parent), name="watch-front", daemon=True
    ).start()
    return serve_core(sock, build)


def _build(model_dir: str | None, config: EngineConfig) -> CoreFace:
    from engine.assembly import core_from_model_dir  # torch: only once the guard has started

    return core_from_model_dir(model_dir, config)


if __name__ == "__main__":
    # os._exit: interpreter shutdown would wait for threads that no longer matter.
    status = run_process(_build)
    logging.shutdown()
    os._exit(status)
