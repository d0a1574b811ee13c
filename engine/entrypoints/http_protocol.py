"""One HTTP connection, with a bound on everything that its client decides.

uvicorn's protocol on httptools reads requests and runs the application; this adds what a server
needs that meets strangers:

- headers: bytes, count and time; bodies: pauses and time (their size is the application's);
- requests that wait behind one another in a connection (pipelining), bytes that are no content
  (chunk extensions, trailers);
- clients that do not read their answers, which wait here and in the kernel's buffers;
- idle connections, and the number of connections;
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
import socket
import urllib.parse
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
from engine.entrypoints.http_faults import (
    MAX_PIPELINED,
    body_too_slow,
    ending_before_body,
    headers_too_large,
    headers_too_slow,
    too_many_connections,
    too_many_headers,
    too_many_pipelined,
    too_much_framing,
)
from engine.entrypoints.http_upgrade import body_parser, has_body
from engine.entrypoints.http_watch import Phase, Watch
from engine.entrypoints.metrics_export import ConnectionStats
from engine.entrypoints.protocol import error_body, to_json
from engine.errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGISendEvent

_LINGER_BYTES = 4 << 20
_FIRST_PEER_CHECK_S = 0.05
_PEER_CHECK_S = 0.5
_TCP_CLOSE = 7  # tcpi_state of a connection that was reset


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
        self._watch = Watch(self, limits, self.loop)
        self._is_deaf = False  # what still comes is thrown away
        self._num_discarded = 0
        self._fault: EngineError | None = None
        self._last_words: EngineError | None = None
        self._active: RequestResponseCycle | None = None
        # Of the request being read.
        self._has_begun = self._has_body = False
        self._header_bytes = self._num_headers = self._idle_bytes = 0

    @property
    def is_closing(self) -> bool:
        return self._watch.phase is Phase.CLOSING or self.transport.is_closing()

    # The transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stats.num_open += 1
        self._watch.enter(Phase.IDLE)
        if self.client is not None:
            # The kernel may hold megabytes of an answer that nobody takes: let it give up, too.
            milliseconds = int(self._limits.send_timeout_s * 1000)
            connected: socket.socket = transport.get_extra_info("socket")
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(too_many_connections(self._limits))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stats.num_open -= 1
        self._watch.stop()
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
        self._watch.saw_data()
        if self._watch.phase in (Phase.IDLE, Phase.ANSWER):
            self._watch.enter(Phase.HEADERS)
        self._has_begun = self._has_body = False
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            reason = str(error) or type(error).__name__
            self._refuse(self._fault or InvalidRequest(f"this is no HTTP/1.1 request: {reason}"))
        else:
            self._check_idle_bytes(len(data))

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # No other protocol is spoken; the request is answered as it is.
            if self._watch.phase is Phase.BODY:
                self.parser = body_parser(self, self.headers)
                self.parser.feed_data(data[upgrade.args[0] :])
            else:
                self._is_deaf = True

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client will send no more; True keeps the connection for the answer."""
        is_whole = self._watch.phase in (Phase.ANSWER, Phase.HEADERS) and self._active is not None
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
        self._watch.begin_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._watch.phase is Phase.CLOSING:
            self._watch.begin_sending()
        else:
            self._watch.end_sending()

    def shutdown(self) -> None:
        """The server ends: finish what is being answered."""
        if self._active is None or self.is_closing:
            self.transport.close()
        elif self._watch.phase is Phase.BODY and not self._is_deaf:
            self._refuse(ending_before_body())
        else:
            self.cycle.keep_alive = False  # of the last one, if several are pipelined

    # The parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        self._header_bytes = self._num_headers = self._idle_bytes = 0
        if self._watch.phase is not Phase.HEADERS:
            self._watch.enter(Phase.HEADERS)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._watch.phase is not Phase.HEADERS:
            return  # a trailer: after the fact, it may not change the request
        self._num_headers += 1
        self._count_header(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count_header(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > self._limits.max_header_bytes:
            self._fail(headers_too_large(self._header_bytes, self._limits))
        if self._num_headers > self._limits.max_header_count:
            self._fail(too_many_headers(self._num_headers, self._limits))

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail(too_many_pipelined())
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
        self._watch.enter(Phase.BODY)
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
        if self.parser.should_upgrade() and has_body(self.headers):
            return  # so the parser says, but the body is still to come
        super().on_message_complete()
        if self._watch.phase is Phase.BODY:
            self._watch.enter(Phase.ANSWER)

    def _fail(self, fault: EngineError) -> NoReturn:
        self._fault = fault
        raise _FaultError

    def _check_idle_bytes(self, num_bytes: int) -> None:
        """Bound what the parser takes without giving anything on, which it may keep."""
        if self._watch.phase is Phase.BODY:
            is_idle = not self._has_body
        else:
            is_idle = self._watch.phase is Phase.HEADERS
        # A chunk of data in which a request began is not counted: most may belong to others.
        self._idle_bytes = self._idle_bytes + num_bytes if is_idle and not self._has_begun else 0
        if self._idle_bytes > self._limits.max_header_bytes:
            in_headers = self._watch.phase is Phase.HEADERS
            fault = headers_too_large if in_headers else too_much_framing
            self._refuse(fault(self._idle_bytes, self._limits))

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
        elif self._watch.phase is Phase.ANSWER:
            self._watch.enter(Phase.IDLE)

    def close_after_answer(self) -> None:
        """Send what is written, then end the connection; nothing more is read from it."""
        if self.is_closing:
            return
        is_unread = self._watch.phase in (Phase.HEADERS, Phase.BODY)
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
        if self._watch.phase is Phase.BODY and not self.cycle.response_complete:
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

    # The watch's calls

    @property
    def num_unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    @property
    def is_held_up(self) -> bool:
        return self.flow.read_paused

    def phase_is_over(self) -> None:
        """The client took too long."""
        if self._watch.phase is Phase.IDLE:
            self.transport.close()
            self._await_end()
        elif not self._is_deaf:
            is_body = self._watch.phase is Phase.BODY
            self._refuse((body_too_slow if is_body else headers_too_slow)(self._limits))

    def answer_is_stuck(self) -> None:
        """Nobody is there for the last bytes."""
        self._stats.faults["answer_not_taken"] += self.num_unsent > 0
        self.transport.abort()

    def _await_end(self) -> None:
        self._watch.enter(Phase.CLOSING)
        self._watch.begin_sending()

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
