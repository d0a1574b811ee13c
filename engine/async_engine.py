"""AsyncEngine: the engine for an asyncio program. The core runs in a process of its own.

    async with AsyncEngine.from_model_dir("model") as engine:
        answer = await engine.rank(user_id="u1", history=[3, 14, 15], candidates=[9, 26, 5])

Every call ends with its answer or with one `EngineError`. Cancelling the awaiting task gives the
request up. When the core dies, all pending calls and all later ones raise `EngineDead`.
torch is never imported here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from enum import Enum
from types import TracebackType
from typing import Self, TypeVar, cast

import msgspec

from engine.config import EngineConfig
from engine.core_launch import CORE_MODULE, LaunchedCore, launch_core
from engine.errors import (
    Draining,
    EngineDead,
    EngineError,
    Overloaded,
    TooLarge,
    from_record,
)
from engine.ipc import (
    Cancel,
    Drain,
    Drained,
    Fatal,
    Forget,
    Forgot,
    FrameError,
    FrameSplitter,
    Heartbeat,
    Outcomes,
    Ready,
    Shutdown,
    Start,
    StatsQuery,
    StatsReply,
    Submit,
    ToCore,
    ToFront,
    to_frame,
    to_front_decoder,
)
from engine.request_builder import ArrayLike, FeaturesLike, build_request, text, user_id_text
from engine.types import (
    CacheMode,
    CoreStats,
    ForgetDone,
    Forgotten,
    ModelInfo,
    Outcome,
    Request,
    Response,
    Task,
)

MAX_UNSENT_BYTES = 1 << 28
"""Bytes that may wait for a core that does not read; beyond it requests are refused."""

_EXIT_WAIT_S = 10.0

log = logging.getLogger(__name__)
T = TypeVar("T")


class Phase(Enum):
    """Where an AsyncEngine is in its life. It only ever moves down this list."""

    NEW = "new"
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


class _Connection(asyncio.Protocol):
    """The front's end of the socket. Owned by the engine's event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no such class

    def data_received(self, received: bytes) -> None:
        try:
            for payload in self._splitter.feed(received):
                self._engine._receive(to_front_decoder.decode(payload))
        except (FrameError, msgspec.DecodeError) as error:
            log.error("the core sent what cannot be read: %s", error)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._engine._lose_core()

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport else 0

    def write(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class AsyncEngine:
    """See the module. Owned by the event loop that called `start`; not for other threads."""

    def __init__(
        self,
        model_dir: str | None,
        config: EngineConfig,
        *,
        drain_timeout_s: float = 30.0,
        core_module: str = CORE_MODULE,
        log_level: str = "INFO",
    ) -> None:
        """Nothing is started yet; `from_model_dir` is the usual way.

        Args:
            drain_timeout_s: How long leaving `async with` waits for pending requests.
            core_module: Module of the core process.
            log_level: Of the core process, which logs to standard error.
        """
        self._model_dir = model_dir
        self._config = config
        self._drain_timeout_s = drain_timeout_s
        self._core_module = core_module
        self._log_level = log_level
        self._phase = Phase.NEW
        self._loop: asyncio.AbstractEventLoop | None = None
        self._core: LaunchedCore | None = None
        self._connection: _Connection | None = None
        self._info: ModelInfo | None = None
        self._heartbeat_s = float("-inf")
        self._last_stats: CoreStats | None = None
        self._cause: EngineError | None = None
        self._numbers = itertools.count(1)
        self._requests: dict[str, asyncio.Future[Outcome]] = {}
        self._forgets: dict[str, asyncio.Future[ForgetDone]] = {}
        self._queries: dict[str, asyncio.Future[CoreStats]] = {}
        self._ready: asyncio.Future[ModelInfo] | None = None
        self._is_ending = False
        self._drained = asyncio.Event()
        self._gone = asyncio.Event()

    @classmethod
    def from_model_dir(
        cls, path: str | os.PathLike[str] | None = None, config: EngineConfig | None = None
    ) -> Self:
        """An engine for that model directory, to be used as `async with` or with `start`.

        Args:
            path: None serves the built-in model with random weights (its scores mean nothing).
            config: Defaults when not given.
        """
        return cls(None if path is None else os.fspath(path), config or EngineConfig())

    # Life

    async def start(self) -> None:
        """Start the core and wait until it serves.

        Raises ConfigError for a model or a setting that cannot work, EngineDead if the core ends.
        """
        if self._phase is not Phase.NEW:
            raise RuntimeError(f"this engine is {self._phase.value}: make a new one to start")
        self._phase = Phase.STARTING
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._core = launch_core(self._core_module, self._log_level)
        self._connection = _Connection(self)
        try:
            await self._loop.create_unix_connection(
                lambda: self._live_connection(), sock=self._core.sock
            )
            self._send(Start(model_dir=self._model_dir, config=self._config))
            self._info = await self._ready
        except BaseException as error:
            if self._phase is not Phase.DEAD:
                self._die(EngineDead("the engine was stopped while it started"))
            self._core.process.kill()
            await self._reap()
            if isinstance(error, EngineError) and self._cause is not None:
                raise self._cause from None
            raise
        self._phase = Phase.SERVING

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for the pending ones; False if some are left."""
        if self._phase is Phase.SERVING:
            self._phase = Phase.DRAINING
            self._send(Drain())
        if self._phase is Phase.DRAINING and not self._drained.is_set():
            try:
                await asyncio.wait_for(self._drained.wait(), timeout_s)
            except TimeoutError:
                log.warning("%d requests are left after %.1f s", len(self._requests), timeout_s)
        return not self._requests

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Drain, end the core, and wait for its process to go. Harmless when repeated.

        What is still pending after `drain_timeout_s` ends with `Draining`.
        """
        if self._phase in (Phase.SERVING, Phase.DRAINING):
            await self.drain(self._drain_timeout_s if drain_timeout_s is None else drain_timeout_s)
        if self._phase is Phase.DRAINING:
            self._is_ending = True
            self._send(Shutdown())
            try:
                await asyncio.wait_for(self._gone.wait(), _EXIT_WAIT_S)
            except TimeoutError:
                log.error("the core did not end within %.0f s: it is killed", _EXIT_WAIT_S)
        if self._phase is not Phase.DEAD:
            self._phase = Phase.STOPPED
        self._fail_pending(Draining("the engine has been shut down"))
        if self._core is not None:
            await self._reap()

    def kill(self) -> None:
        """End the core at once, without any answer. For the last exit of a program."""
        if self._core is not None and self._core.process.poll() is None:
            self._core.process.kill()

    async def wait_dead(self) -> EngineError:
        """Return only when the core has ended without being told to, with the reason."""
        await self._gone.wait()
        if self._phase is not Phase.DEAD:
            await asyncio.get_running_loop().create_future()
        return self._death()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _reap(self) -> None:
        """Wait for the process to end; kill it if it does not."""
        assert self._core is not None
        process = self._core.process
        if process.poll() is None:
            try:
                await asyncio.to_thread(process.wait, _EXIT_WAIT_S)
            except BaseException:
                process.kill()
                process.wait()
        if self._connection is not None:
            self._connection.close()
        self._core.sock.close()

    # State

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises EngineDead before the core is ready."""
        if self._info is None:
            raise self.refusal()
        return self._info

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken now."""
        return self._phase is Phase.SERVING

    @property
    def core_pid(self) -> int | None:
        """Process id of the core, None before `start`."""
        return None if self._core is None else self._core.process.pid

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the core's last sign of life; infinite before the first."""
        return max(0.0, time.monotonic() - self._heartbeat_s)

    @property
    def last_stats(self) -> CoreStats | None:
        """What the last heartbeat said (a fraction of a second old), None before the first."""
        return self._last_stats

    @property
    def num_pending(self) -> int:
        """Requests sent to the core and not answered."""
        return len(self._requests)

    # Calls

    async def rank(
        self,
        *,
        user_id: str | int,
        history: FeaturesLike,
        candidates: FeaturesLike,
        context: ArrayLike | None = None,
        query_time: int | None = None,
        namespace: str = "",
        top_k: int | None = None,
        return_user_embedding: bool = False,
        deadline_ms: float | None = None,
        priority: int = 0,
        cache: CacheMode | str = CacheMode.USE,
        history_start: int = 0,
        ignore_extra: bool = False,
        request_id: str | None = None,
    ) -> Response:
        """Scores of the candidates, float32 [num_candidates, num_tasks]; see `build_request`."""
        return await self.submit(
            build_request(
                task=Task.RANK,
                user_id=user_id,
                history=history,
                candidates=candidates,
                context=context,
                query_time=query_time,
                namespace=namespace,
                top_k=top_k,
                return_user_embedding=return_user_embedding,
                deadline_ms=deadline_ms,
                priority=priority,
                cache=cache,
                history_start=history_start,
                ignore_extra=ignore_extra,
                request_id=request_id,
            )
        )

    async def retrieve(
        self,
        *,
        user_id: str | int,
        history: FeaturesLike,
        context: ArrayLike | None = None,
        query_time: int | None = None,
        namespace: str = "",
        top_k: int = 10,
        exclude_history: bool = False,
        return_user_embedding: bool = False,
        deadline_ms: float | None = None,
        priority: int = 0,
        cache: CacheMode | str = CacheMode.USE,
        history_start: int = 0,
        ignore_extra: bool = False,
        request_id: str | None = None,
    ) -> Response:
        """The best `top_k` items of the catalogue and their scores; see `build_request`."""
        return await self.submit(
            build_request(
                task=Task.RETRIEVE,
                user_id=user_id,
                history=history,
                context=context,
                query_time=query_time,
                namespace=namespace,
                top_k=top_k,
                exclude_history=exclude_history,
                return_user_embedding=return_user_embedding,
                deadline_ms=deadline_ms,
                priority=priority,
                cache=cache,
                history_start=history_start,
                ignore_extra=ignore_extra,
                request_id=request_id,
            )
        )

    async def submit(self, request: Request) -> Response:
        """The answer to a request of `build_request`. Raises the EngineError it ended with."""
        core_id = f"{request.request_id}/{next(self._numbers)}"
        frame = self._admissible_frame(
            Submit(request=msgspec.structs.replace(request, request_id=core_id))
        )
        try:
            outcome = await self._ask(frame, self._requests, core_id)
        except asyncio.CancelledError:
            self._send(Cancel(request_id=core_id))
            raise
        if outcome.error is not None:
            raise from_record(outcome.error)
        assert outcome.response is not None
        return msgspec.structs.replace(outcome.response, request_id=request.request_id)

    async def prefetch(
        self,
        *,
        user_id: str | int,
        history: FeaturesLike | None = None,
        context: ArrayLike | None = None,
        query_time: int | None = None,
        namespace: str = "",
        deadline_ms: float | None = None,
        priority: int = 0,
        history_start: int = 0,
        ignore_extra: bool = False,
        request_id: str | None = None,
    ) -> Response:
        """Compute and keep a history; without one, bring a known state to the device."""
        return await self.submit(
            build_request(
                task=Task.PREFETCH,
                user_id=user_id,
                history=history,
                context=context,
                query_time=query_time,
                namespace=namespace,
                deadline_ms=deadline_ms,
                priority=priority,
                history_start=history_start,
                ignore_extra=ignore_extra,
                request_id=request_id,
            )
        )

    async def forget(self, user_id: str | int, namespace: str = "") -> Forgotten:
        """Remove a user's state from all tiers; it is gone when this returns."""
        self._check_takes_requests()
        ticket = f"f{next(self._numbers)}"
        message = Forget(
            namespace=text(namespace, "namespace"), user_id=user_id_text(user_id), ticket=ticket
        )
        return (await self._ask(to_frame(message), self._forgets, ticket)).forgotten

    async def stats(self) -> CoreStats:
        """The core's metrics as of now."""
        if self._phase not in (Phase.SERVING, Phase.DRAINING):
            raise self.refusal()
        ticket = f"s{next(self._numbers)}"
        return await self._ask(to_frame(StatsQuery(ticket=ticket)), self._queries, ticket)

    async def _ask(self, frame: bytes, table: dict[str, asyncio.Future[T]], key: str) -> T:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise RuntimeError("this engine belongs to the event loop that started it")
        assert self._connection is not None
        future: asyncio.Future[T] = loop.create_future()
        table[key] = future
        self._connection.write(frame)
        try:
            return await future
        finally:
            table.pop(key, None)

    def _admissible_frame(self, message: Submit) -> bytes:
        self._check_takes_requests()
        assert self._connection is not None
        unsent_bytes = self._connection.unsent_bytes
        if unsent_bytes > MAX_UNSENT_BYTES:
            raise Overloaded(
                f"{unsent_bytes} bytes of requests wait for the core, the limit is "
                f"{MAX_UNSENT_BYTES}: retry later",
                limit=MAX_UNSENT_BYTES,
                value=unsent_bytes,
            )
        try:
            return to_frame(message)
        except FrameError as error:
            raise TooLarge(f"{error}: send less at once") from None

    def _check_takes_requests(self) -> None:
        if self._phase is not Phase.SERVING:
            raise self.refusal()

    def refusal(self) -> EngineError:
        """Why a request is not taken now; for when `is_ready` is false."""
        match self._phase:
            case Phase.NEW:
                return EngineDead("the engine has not been started: use `async with` or `start`")
            case Phase.STARTING:
                return EngineDead("the engine is starting: the model is not loaded yet")
            case Phase.DRAINING | Phase.STOPPED:
                return Draining("the engine is shutting down and takes no new requests")
            case _:
                return self._death()

    # From the core

    def _live_connection(self) -> _Connection:
        assert self._connection is not None
        return self._connection

    def _send(self, message: ToCore) -> None:
        assert self._connection is not None
        self._connection.write(to_frame(message))

    def _receive(self, message: ToFront) -> None:
        match message:
            case Outcomes(outcomes=outcomes):
                for outcome in outcomes:
                    _resolve(self._requests, outcome.request_id, outcome)
            case Heartbeat(sent_s=sent_s, stats=stats):
                self._heartbeat_s = sent_s
                self._last_stats = stats
            case StatsReply(ticket=ticket, stats=stats):
                self._last_stats = stats
                _resolve(self._queries, ticket, stats)
            case Forgot(done=done):
                _resolve(self._forgets, done.ticket, done)
            case Ready(info=info):
                self._heartbeat_s = time.monotonic()
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(info)
            case Drained():
                self._drained.set()
            case Fatal(error=error):
                self._die(from_record(error))

    def _lose_core(self) -> None:
        """The socket is closed: the process has ended or is about to."""
        if not self._is_ending:
            pid = self.core_pid
            self._die(EngineDead(f"the core process {pid} has ended unexpectedly"))
        self._drained.set()
        self._gone.set()

    def _die(self, cause: EngineError) -> None:
        if self._phase is Phase.DEAD:
            return
        self._phase = Phase.DEAD
        self._cause = cause
        log.error("the core is dead: %s", cause)
        self._fail_pending(self._death())
        self._drained.set()
        self._gone.set()

    def _death(self) -> EngineError:
        """A fresh EngineDead that names the cause (an exception must not be raised twice)."""
        cause = self._cause
        return EngineDead(cause.message if cause is not None else "the core has ended")

    def _fail_pending(self, error: EngineError) -> None:
        for table in (self._requests, self._forgets, self._queries):
            for future in table.values():
                if not future.done():
                    future.set_exception(type(error)(error.message))
            table.clear()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(type(error)(error.message))


def _resolve(table: dict[str, asyncio.Future[T]], key: str, result: T) -> None:
    """Answer a call; one that was given up meanwhile is no longer in the table."""
    future = table.pop(key, None)
    if future is not None and not future.done():
        future.set_result(result)
