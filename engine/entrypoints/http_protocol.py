"""One HTTP connection, with a bound on everything that its client decides.

uvicorn's protocol on httptools reads requests and runs the application; this adds what a server
needs that meets strangers:

- headers: bytes, count and time; bodies: pauses and time (their size is the application's);
- requests that wait behind one another in a connection (pipelining), bytes that are no content
  (chunk extensions, trailers);
- clients that do not read their answers; idle connections; the number of connections;
- a fault while earlier requests of the connection are unanswered is told after their answers.

When a request is answered before its body has come, the connection ends: the answer is sent, what
still comes is thrown away for a moment (so that a reset does not overtake the answer), and that is
all. Nothing of a refused body is kept.

A client may close its sending side and still wait for its answer. To TCP that looks like a client
that has left, so such a connection is asked: an interim `102 Processing` makes the kernel of a
client that has left reset the connection, which cancels the request.
"""

from __future__ import annotations

import asyncio
import math
import socket
import urllib.parse
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from engine.entrypoints.asgi import JSON, REFUSAL
from engine.entrypoints.config import ConnectionConfig
from engine.entrypoints.metrics_export import ConnectionStats
from engine.entrypoints.protocol import error_body, to_json
from engine.errors import (
    EngineError,
    HeadersTooLarge,
    InvalidRequest,
    RequestTimeout,
    TooManyConnections,
)

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGISendEvent

MAX_PIPELINED = 32
"""Requests of one connection that may wait for the answer to an earlier one."""

_MIN_SENT_BYTES = 1 << 16  # what a client must take of its answer in `send_timeout_s`
_LINGER_S = 2.0
_LINGER_BYTES = 4 << 20
_FIRST_PEER_CHECK_S = 0.05
_PEER_CHECK_S = 0.5
_TCP_CLOSE = 7  # tcpi_state of a connection that was reset


class _Phase(Enum):
    """What the connection's reading side is at."""

    IDLE = "between requests"
    HEADERS = "in a request's headers"
    BODY = "in a request's body"
    ANSWER = "a whole request is being answered"
    CLOSING = "only the last bytes are being sent"


class _FaultError(Exception):
    """Ends the parsing; the reason is the connection's `_fault`."""


class _Outlet:
    """What an answer is written to: the transport, except that the connection closes itself."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, content: bytes) -> None:
        self._connection.transport.write(content)

    def close(self) -> None:
        self._connection.close_after_answer()

    def is_closing(self) -> bool:
        return self._connection.is_closing


class _Cycle(RequestResponseCycle):
    """One request and its answer; one that is answered before its body ends the connection."""

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start" and self.more_body:
            self.keep_alive = False
        await super().send(message)


class Connection(HttpToolsProtocol):
    """See the module. Owned by the server's event loop."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionConfig,
        stats: ConnectionStats,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._stats = stats
        self._outlet: Any = _Outlet(self)
        self._phase = _Phase.IDLE
        self._phase_since_s = self._data_seen_s = 0.0
        self._is_fresh = True
        self._is_deaf = False  # what still comes is thrown away
        self._num_discarded = 0
        self._fault: EngineError | None = None
        self._last_words: EngineError | None = None
        self._active: RequestResponseCycle | None = None
        # Of the request being read.
        self._has_begun = self._has_body = False
        self._header_bytes = self._num_headers = self._idle_bytes = 0
        # Of the answer being sent: since when, and how much there was then.
        self._unsent_since_s: float | None = None
        self._unsent_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_closing(self) -> bool:
        return self._phase is _Phase.CLOSING or self.transport.is_closing()

    # The transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stats.num_open += 1
        self._enter(_Phase.IDLE)
        limit = self._limits.max_connections
        if len(self.connections) > limit:
            self._refuse(
                TooManyConnections(
                    f"{limit} connections are open, the limit is max_connections={limit}: "
                    "close some or raise the limit",
                    limit=limit,
                    value=limit + 1,
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._stats.num_open -= 1
        if self._timer is not None:
            self._timer.cancel()
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in (self._active, *waiting):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._discard(data)
            return
        self._data_seen_s = self.loop.time()
        if self._phase in (_Phase.IDLE, _Phase.ANSWER):
            self._enter(_Phase.HEADERS)
        self._has_begun = self._has_body = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._is_deaf = True  # no other protocol is spoken; the request is answered as it is
        except httptools.HttpParserError as error:
            reason = str(error) or type(error).__name__
            self._refuse(self._fault or InvalidRequest(f"this is no HTTP/1.1 request: {reason}"))
        else:
            self._check_idle_bytes(len(data))

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client will send no more; True keeps the connection for the answer."""
        is_whole = self._phase in (_Phase.ANSWER, _Phase.HEADERS) and self._active is not None
        if not is_whole or not self._is_plain_tcp or self.scope["http_version"] != "1.1":
            self._await_end()
            return False
        self._is_deaf = True
        assert self._active is not None
        if not self._active.response_started:
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        self.loop.call_later(_FIRST_PEER_CHECK_S, self._check_peer)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._note_unsent()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._phase is _Phase.CLOSING:
            self._note_unsent()
        else:
            self._unsent_since_s = None

    def shutdown(self) -> None:
        """The server ends: finish what is being answered."""
        if self._active is None or self.is_closing:
            self.transport.close()
        else:
            self.cycle.keep_alive = False  # of the last one, if several are pipelined

    # The parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        self._header_bytes = self._num_headers = self._idle_bytes = 0
        if self._phase is not _Phase.HEADERS:
            self._enter(_Phase.HEADERS)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is not _Phase.HEADERS:
            return  # a trailer: after the fact, it may not change the request
        self._num_headers += 1
        self._count_header(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count_header(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        limits = self._limits
        if self._header_bytes > limits.max_header_bytes:
            self._fail(_headers_too_large(self._header_bytes, limits))
        if self._num_headers > limits.max_header_count:
            self._fail(
                HeadersTooLarge(
                    f"{self._num_headers} headers or more, the limit is max_header_count="
                    f"{limits.max_header_count}: send fewer",
                    limit=limits.max_header_count,
                    value=self._num_headers,
                )
            )

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail(
                InvalidRequest(
                    f"{MAX_PIPELINED} requests of this connection wait for their answers: "
                    "read them before sending more",
                    limit=MAX_PIPELINED,
                )
            )
        self._fill_scope()
        cycle = self.cycle = _Cycle(
            scope=self.scope,
            transport=self._outlet,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=(
                self.scope["http_version"] == "1.1"
                and self.parser.should_keep_alive()
                and not self.parser.should_upgrade()
            ),
            on_response=self.on_response_complete,
        )
        self._enter(_Phase.BODY)
        if self._active is None:
            self._start_asgi_task(cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def _fill_scope(self) -> None:
        scope, version = self.scope, self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._fail(InvalidRequest(f"HTTP/{version} is not spoken here: use HTTP/1.1"))
        try:
            parsed = httptools.parse_url(self.url)
        except httptools.HttpParserInvalidURLError:
            self._fail(InvalidRequest("the request's target is no path"))
        raw_path: bytes = parsed.path or b"/"
        if not raw_path.isascii():
            self._fail(InvalidRequest("the request's path is not ASCII: quote it"))
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = version
        scope["raw_path"] = raw_path
        scope["path"] = urllib.parse.unquote(raw_path.decode("ascii"))
        scope["query_string"] = parsed.query or b""

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._phase is _Phase.BODY:
            self._enter(_Phase.ANSWER)

    def _fail(self, fault: EngineError) -> NoReturn:
        self._fault = fault
        raise _FaultError

    def _check_idle_bytes(self, num_bytes: int) -> None:
        """Bound what the parser takes without giving anything on, which it may keep."""
        if self._phase is _Phase.BODY:
            is_idle = not self._has_body
        else:
            is_idle = self._phase is _Phase.HEADERS
        # A chunk of data in which a request began is not counted: most may belong to others.
        self._idle_bytes = self._idle_bytes + num_bytes if is_idle and not self._has_begun else 0
        if self._idle_bytes > self._limits.max_header_bytes:
            if self._phase is _Phase.HEADERS:
                self._refuse(_headers_too_large(self._idle_bytes, self._limits))
            else:
                self._refuse(
                    InvalidRequest(
                        f"{self._idle_bytes} bytes of chunk extensions or trailers, the limit is "
                        f"max_header_bytes={self._limits.max_header_bytes}: leave them out",
                        limit=self._limits.max_header_bytes,
                        value=self._idle_bytes,
                    )
                )

    # Answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._active = None
        if self.is_closing:
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._last_words is not None:
            self._say(self._last_words)
        elif self._is_deaf:
            self.close_after_answer()
        elif self._phase is _Phase.ANSWER:
            self._enter(_Phase.IDLE)

    def close_after_answer(self) -> None:
        """Send what is written, then end the connection; nothing more is read from it."""
        if self.is_closing:
            return
        is_unread = self._phase in (_Phase.HEADERS, _Phase.BODY)
        self._is_deaf = True
        self.flow.resume_reading()
        if is_unread and self._is_plain_tcp:
            # Closing now would reset the connection, and the answer might be lost with it.
            self.transport.write_eof()
        else:
            self.transport.close()
        self._await_end()

    def _refuse(self, fault: EngineError) -> None:
        """End the connection with this error, after the answers that are due before it."""
        self._stats.faults[fault.code] += 1
        self._is_deaf = True
        if self._phase is _Phase.BODY and not self.cycle.response_complete:
            # The application answers: it waits for the body.
            self.scope[REFUSAL] = fault  # type: ignore[literal-required]
            self.cycle.message_event.set()
        elif self._active is not None:
            self._last_words = fault
        else:
            self._say(fault)

    def _say(self, fault: EngineError) -> None:
        body = to_json(error_body(fault))
        self.transport.write(
            b"%bcontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (STATUS_LINE[fault.status], JSON, len(body), body)
        )
        self.close_after_answer()

    def _discard(self, data: bytes) -> None:
        self._num_discarded += len(data)
        if self._num_discarded > _LINGER_BYTES:
            self.transport.abort()

    # Time

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._phase_since_s = self._data_seen_s = self.loop.time()
        if phase is not _Phase.IDLE:
            self._is_fresh = False
        self._arm()

    def _await_end(self) -> None:
        self._enter(_Phase.CLOSING)
        self._note_unsent()

    def _note_unsent(self) -> None:
        self._unsent_since_s = self.loop.time()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._arm()

    def _phase_deadline_s(self) -> float:
        limits, since_s = self._limits, self._phase_since_s
        if self._phase is _Phase.IDLE:
            return since_s + (limits.header_timeout_s if self._is_fresh else limits.keep_alive_s)
        if self._phase is _Phase.HEADERS:
            return since_s + limits.header_timeout_s
        if self._phase is _Phase.BODY:
            return min(
                since_s + limits.body_timeout_s, self._data_seen_s + limits.body_idle_timeout_s
            )
        return math.inf

    def _send_deadline_s(self) -> float:
        if self._unsent_since_s is None:
            return math.inf
        is_lingering = self._phase is _Phase.CLOSING and not self._unsent_bytes
        return self._unsent_since_s + (_LINGER_S if is_lingering else self._limits.send_timeout_s)

    def _arm(self) -> None:
        """Have `_check` called at the next deadline; a timer that is too early looks again."""
        deadline_s = min(self._phase_deadline_s(), self._send_deadline_s())
        if self._timer is not None:
            if self._timer.when() <= deadline_s:
                return
            self._timer.cancel()
            self._timer = None
        if deadline_s < math.inf:
            self._timer = self.loop.call_at(deadline_s, self._check)

    def _check(self) -> None:
        """Act on the deadlines that have passed."""
        self._timer = None
        now_s = self.loop.time()
        if self.flow.read_paused:
            self._phase_since_s = self._data_seen_s = now_s  # it is not the client who delays
        if now_s >= self._send_deadline_s() and not self._has_taken_enough():
            self._stats.faults["answer_not_taken"] += self._unsent_bytes > 0
            self.transport.abort()
        elif now_s >= self._phase_deadline_s():
            self._end_phase()
        else:
            self._arm()

    def _has_taken_enough(self) -> bool:
        """Whether the client reads its answer; then it is given as much time again."""
        before = self._unsent_bytes
        self._note_unsent()
        return 0 < self._unsent_bytes <= before - _MIN_SENT_BYTES

    def _end_phase(self) -> None:
        if self._phase is _Phase.IDLE:
            self.transport.close()
            self._await_end()
        elif not self._is_deaf:
            self._refuse(_timeout(self._phase, self._limits))

    # The other side

    @property
    def _is_plain_tcp(self) -> bool:
        return self.scheme == "http" and self.client is not None

    def _check_peer(self) -> None:
        """End a half-closed connection whose client has gone altogether."""
        if self.is_closing:
            return
        connected: socket.socket = self.transport.get_extra_info("socket")
        state = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if state == _TCP_CLOSE:
            self.transport.abort()
        else:
            self.loop.call_later(_PEER_CHECK_S, self._check_peer)


def _headers_too_large(num_bytes: int, limits: ConnectionConfig) -> HeadersTooLarge:
    return HeadersTooLarge(
        f"the request line and headers have {num_bytes} bytes or more, the limit is "
        f"max_header_bytes={limits.max_header_bytes}: send less",
        limit=limits.max_header_bytes,
        value=num_bytes,
    )


def _timeout(phase: _Phase, limits: ConnectionConfig) -> RequestTimeout:
    if phase is _Phase.HEADERS:
        return RequestTimeout(
            f"the headers were not complete after header_timeout_s={limits.header_timeout_s:g}: "
            "send them at once",
            limit=limits.header_timeout_s,
        )
    return RequestTimeout(
        f"the body paused for body_idle_timeout_s={limits.body_idle_timeout_s:g} or was not "
        f"complete after body_timeout_s={limits.body_timeout_s:g}: send it faster",
        limit=limits.body_timeout_s,
    )
