"""The asyncio front's side of a core: its life, and who waits for which answer.

Every call ends: with the core's answer, or with the error that the core's end gives to all that
is pending. `AsyncEngine` is the public face of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from enum import Enum
from typing import TypeVar, cast

import msgspec

from engine.commands import Command, Reply, Result, ServedWeights, Statistics, check_types
from engine.config import EngineConfig
from engine.core_launch import CoreOptions, LaunchedCore, launch_core
from engine.core_watch import SilenceWatch
from engine.errors import Draining, EngineDead, EngineError, Overloaded, TooLarge, from_record
from engine.ipc import (
    Cancel,
    Done,
    Drain,
    Drained,
    Fatal,
    FrameError,
    FrameSplitter,
    Heartbeat,
    Outcomes,
    Ready,
    Run,
    Shutdown,
    Start,
    Submit,
    ToCore,
    ToFront,
    WeightsChanged,
    to_frame,
    to_front_decoder,
)
from engine.types import CoreStats, Outcome, Request

MAX_UNSENT_BYTES = 1 << 28
"""Bytes that may wait for a core that does not read; beyond it requests are refused."""

_HEARTBEAT_CHECK_S = 0.5
_CORE_ENDS_ITSELF_S = 2.0
"""How much longer than the core itself the front waits before it ends a hung one."""
_STACKS_WAIT_S = 0.5
_KILL_WAIT_S = 0.5

log = logging.getLogger(__name__)
T = TypeVar("T")


class Phase(Enum):
    """Where a core is in its life. It only ever moves down this list, to one of the last two."""

    NEW = "new"
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


class _Connection(asyncio.Protocol):
    """The front's end of the socket. Owned by the event loop of its client."""

    def __init__(self, client: CoreClient) -> None:
        self._client = client
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no such class

    def data_received(self, received: bytes) -> None:
        try:
            for payload in self._splitter.feed(received):
                self._client.receive(to_front_decoder.decode(payload))
        except (FrameError, msgspec.DecodeError) as error:
            log.error("the core sent what cannot be read: %s", error)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._client.lose_core()

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport else 0

    def write(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class CoreClient:
    """One core, from start to end. Owned by the event loop that called `start`."""

    def __init__(self, options: CoreOptions) -> None:
        self._options = options
        self.phase = Phase.NEW
        self.heartbeat_s = float("-inf")
        self.last_stats: CoreStats | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._core: LaunchedCore | None = None
        self._connection = _Connection(self)
        self._served: ServedWeights | None = None
        self._cause: EngineError | None = None
        self._is_ending = False
        self._numbers = itertools.count(1)
        self._requests: dict[str, asyncio.Future[Outcome]] = {}
        self._commands: dict[str, asyncio.Future[Reply]] = {}
        self._starts: dict[str, asyncio.Future[ServedWeights]] = {}
        self._drained = asyncio.Event()
        self._gone = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    # Life

    async def start(self, model_dir: str | None, config: EngineConfig) -> None:
        """Start the core and wait until it serves.

        Raises ConfigError for a model or a setting that cannot work, EngineDead if the core ends.
        """
        if self.phase is not Phase.NEW:
            raise RuntimeError(f"this engine is {self.phase.value}: make a new one to start")
        self.phase = Phase.STARTING
        self._loop = asyncio.get_running_loop()
        self._core = launch_core(self._options)
        try:
            await self._loop.create_unix_connection(lambda: self._connection, sock=self._core.sock)
            message = Start(model_dir=model_dir, config=config)
            self._served = await self._ask(to_frame(message), self._starts, "start")
        except BaseException:
            if self.phase is Phase.STARTING:
                self.phase = Phase.STOPPED
            self._is_ending = True
            self.kill()
            if not await self._reap(self._options.exit_timeout_s):
                log.error("%s", self._immortal())
            raise
        self.phase = Phase.SERVING
        if config.health.heartbeat_kill_s:
            limit_s = config.health.heartbeat_kill_s + _CORE_ENDS_ITSELF_S
            self._watching = asyncio.ensure_future(self._watch_heartbeat(limit_s))

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for the pending ones; False if some are left."""
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING
            self._send(Drain())
        if self.phase is Phase.DRAINING and not self._drained.is_set():
            try:
                await asyncio.wait_for(self._drained.wait(), timeout_s)
            except TimeoutError:
                log.warning("%d requests are left after %.1f s", len(self._requests), timeout_s)
        return not self._requests

    async def stop(self, drain_timeout_s: float) -> None:
        """Drain, end the core, and wait until it has gone. Harmless when repeated.

        What is still pending after `drain_timeout_s` ends with `Draining`. From then on it takes
        at most `exit_timeout_s`: a core process that does not end by itself is killed. Raises
        EngineDead when a core thread does not end: it hangs, and only the end of this process
        ends it.
        """
        deadline_s = time.monotonic() + self._options.exit_timeout_s
        try:
            if self.phase in (Phase.SERVING, Phase.DRAINING):
                await self.drain(drain_timeout_s)
            self._is_ending = True
            deadline_s = time.monotonic() + self._options.exit_timeout_s
            if self.phase is Phase.DRAINING:
                self._send(Shutdown())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), self._options.exit_timeout_s)
            elif self.phase is Phase.STARTING:
                self.kill()
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            if self.phase is not Phase.DEAD:
                self.phase = Phase.STOPPED
            self._fail_pending(Draining("the engine has been shut down"))
            has_ended = await self._reap(deadline_s - time.monotonic())
        if not has_ended:
            raise self._immortal()

    def kill(self) -> None:
        """End the core at once, without any answer. A thread ends with its next pass, if any."""
        if self._core is not None:
            self._core.handle.kill()

    async def wait_dead(self) -> EngineError:
        """Return only when the core has ended without being told to, with the reason."""
        await self._gone.wait()
        if self.phase is not Phase.DEAD:
            await asyncio.get_running_loop().create_future()
        return self._death()

    async def _reap(self, timeout_s: float) -> bool:
        """Wait for the core to end; kill it if it does not, or if the wait is cancelled. False:
        it is a thread and hangs."""
        if self._watching is not None:
            self._watching.cancel()
        if self._core is None:
            return True
        core = self._core.handle
        try:
            if core.is_running():
                await asyncio.to_thread(core.wait, max(0.0, timeout_s))
        finally:
            if core.is_running():
                log.error("the %s has not ended by itself: it is killed", core)
                core.kill()
            self._connection.close()
            self._core.sock.close()
            has_ended = core.wait(_KILL_WAIT_S)
        return has_ended

    def _immortal(self) -> EngineError:
        assert self._core is not None
        return EngineDead(
            f"the {self._core.handle} hangs and cannot be killed: end this process, or run the "
            "core in a process of its own"
        )

    async def _watch_heartbeat(self, limit_s: float) -> None:
        """End a core that has given no sign of life for `limit_s`."""
        watch = SilenceWatch(limit_s, _HEARTBEAT_CHECK_S)
        while not watch.is_over(time.monotonic(), self.heartbeat_s):
            await asyncio.sleep(_HEARTBEAT_CHECK_S)
            if self.phase not in (Phase.SERVING, Phase.DRAINING):
                return
        assert self._core is not None
        core = self._core.handle
        log.critical("the %s has been silent for %.0f s and is ended; its stacks:", core, limit_s)
        core.dump_stacks()
        await asyncio.sleep(_STACKS_WAIT_S)
        self._die(EngineDead(f"the {core} hung: it was silent for {limit_s:g} s"))
        core.kill()

    # State

    @property
    def served(self) -> ServedWeights:
        """The versions that requests may name. Raises EngineDead before the core is ready."""
        if self._served is None:
            raise self.refusal()
        return self._served

    @property
    def pid(self) -> int | None:
        return None if self._core is None else self._core.handle.pid

    @property
    def num_pending(self) -> int:
        return len(self._requests)

    def refusal(self) -> EngineError:
        """Why a request is not taken now; for when the phase is not SERVING."""
        match self.phase:
            case Phase.NEW:
                return EngineDead("the engine has not been started: use `async with` or `start`")
            case Phase.STARTING:
                return EngineDead("the engine is starting: the model is not loaded yet")
            case Phase.DRAINING | Phase.STOPPED:
                return Draining("the engine is shutting down and takes no new requests")
            case _:
                return self._death()

    # Calls

    async def submit(self, request: Request) -> Outcome:
        """The outcome of a request. Cancelling the caller gives it up. Raises EngineError."""
        self._check_serves()
        core_id = f"{request.request_id}/{next(self._numbers)}"
        message = Submit(request=msgspec.structs.replace(request, request_id=core_id))
        unsent_bytes = self._connection.unsent_bytes
        if unsent_bytes > MAX_UNSENT_BYTES:
            raise Overloaded(
                f"{unsent_bytes} bytes of requests wait for the core, the limit is "
                f"{MAX_UNSENT_BYTES}: retry later",
                limit=MAX_UNSENT_BYTES,
                value=unsent_bytes,
            )
        try:
            frame = to_frame(message)
        except FrameError as error:
            raise TooLarge(f"{error}: send less at once") from None
        try:
            return await self._ask(frame, self._requests, core_id)
        except asyncio.CancelledError:
            self._send(Cancel(request_id=core_id))
            raise

    async def run(self, command: Command) -> Result:
        """What a command gives. Raises the EngineError that it ended with.

        The core goes on with a command whose caller is cancelled."""
        check_types(command)
        if self.phase not in (Phase.SERVING, Phase.DRAINING):
            raise self.refusal()
        ticket = f"c{next(self._numbers)}"
        frame = to_frame(Run(ticket=ticket, command=command))
        reply = await self._ask(frame, self._commands, ticket)
        if reply.error is not None:
            raise from_record(reply.error)
        assert reply.result is not None
        return reply.result

    def _check_serves(self) -> None:
        if self.phase is not Phase.SERVING:
            raise self.refusal()

    async def _ask(self, frame: bytes, table: dict[str, asyncio.Future[T]], key: str) -> T:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise RuntimeError("this engine belongs to the event loop that started it")
        future: asyncio.Future[T] = loop.create_future()
        table[key] = future
        self._connection.write(frame)
        try:
            return await future
        finally:
            table.pop(key, None)

    def _send(self, message: ToCore) -> None:
        self._connection.write(to_frame(message))

    # From the core

    def receive(self, message: ToFront) -> None:
        """Take a message of the core."""
        match message:
            case Outcomes(outcomes=outcomes):
                for outcome in outcomes:
                    _resolve(self._requests, outcome.request_id, outcome)
            case Heartbeat(sent_s=sent_s, stats=stats):
                self.heartbeat_s = sent_s
                self.last_stats = stats
            case Done(reply=reply):
                if isinstance(reply.result, Statistics):
                    self.last_stats = reply.result.stats
                _resolve(self._commands, reply.ticket, reply)
            case WeightsChanged(weights=weights):
                self._served = weights
            case Ready(weights=weights):
                self.heartbeat_s = time.monotonic()
                _resolve(self._starts, "start", weights)
            case Drained():
                self._drained.set()
            case Fatal(error=error):
                self._die(from_record(error))

    def lose_core(self) -> None:
        """The socket is closed: the process has ended or is about to."""
        if not self._is_ending:
            core = "core" if self._core is None else self._core.handle
            self._die(EngineDead(f"the {core} has ended unexpectedly"))
        self._drained.set()
        self._gone.set()

    def _die(self, cause: EngineError) -> None:
        if self.phase is Phase.DEAD:
            return
        was_starting = self.phase is Phase.STARTING
        self.phase = Phase.DEAD
        self._cause = cause
        if not was_starting:  # otherwise `start` raises it
            log.error("the core is dead: %s", cause)
        for start in self._starts.values():
            if not start.done():
                start.set_exception(cause)
        self._fail_pending(self._death())
        self._drained.set()
        self._gone.set()

    def _death(self) -> EngineError:
        """A fresh EngineDead with the cause's words (one exception must not be raised twice)."""
        return EngineDead("the core has ended" if self._cause is None else self._cause.message)

    def _fail_pending(self, error: EngineError) -> None:
        for table in (self._requests, self._commands, self._starts):
            for future in table.values():
                if not future.done():
                    future.set_exception(type(error)(error.message))
            table.clear()


def _resolve(table: dict[str, asyncio.Future[T]], key: str, result: T) -> None:
    """Answer a call; one that was given up meanwhile is no longer in the table."""
    future = table.pop(key, None)
    if future is not None and not future.done():
        future.set_result(result)
