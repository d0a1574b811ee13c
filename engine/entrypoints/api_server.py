"""The HTTP server: `python -m engine.entrypoints.api_server --model DIR` (= `mtserve serve`).

The server listens at once; it is live while the model loads and ready when the core is. SIGTERM
or SIGINT drains: not ready, new requests get 503, pending ones are answered, exit status 0. A
second signal ends everything at once. When the core dies, pending requests get 503 and the server
exits with status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import os
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import uvicorn
import uvloop

from engine.async_engine import AsyncEngine
from engine.core_launch import CORE_MODULE
from engine.entrypoints import access_log
from engine.entrypoints.app import App
from engine.entrypoints.config import ServeConfig, ServerConfig
from engine.entrypoints.grpc.launch import grpc_server
from engine.entrypoints.http_protocol import Connection
from engine.entrypoints.open_files import fit_connections
from engine.entrypoints.protocol import to_json
from engine.entrypoints.security import Authenticator, exposure_warning
from engine.entrypoints.tls import tls_context
from engine.errors import ConfigError, EngineError

EXIT_CORE_DEAD = 1
EXIT_CONFIG = 2

_BACKLOG = 2048
_LAST_ANSWERS_S = 5
_DEAD_LINGER_S = 1.0

log = logging.getLogger("engine.server")


class _Listener(uvicorn.Server):
    """uvicorn without its signal handlers, `ServerLife` owns the signals, and with our TLS."""

    def __init__(self, app: App, config: ServerConfig, tls: ssl.SSLContext | None) -> None:
        limits = config.connections
        max_connections = fit_connections(limits.max_connections)
        limits = msgspec.structs.replace(limits, max_connections=max_connections)
        connection: Any = functools.partial(
            Connection, limits=limits, stats=app.metrics.connections
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=connection,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_LAST_ANSWERS_S,
            )
        )
        self._tls = tls
        self._handshake_timeout_s = limits.header_timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on the sockets."""
        loop = asyncio.get_running_loop()

        def connection() -> asyncio.Protocol:
            protocol: asyncio.Protocol = self.config.http_protocol_class(
                config=self.config, server_state=self.server_state, app_state={}, _loop=loop
            )  # type: ignore[call-arg]
            return protocol

        timeout_s = self._handshake_timeout_s if self._tls else None
        self.servers = [
            await loop.create_server(
                connection, sock=sock, ssl=self._tls, backlog=_BACKLOG,
                ssl_handshake_timeout=timeout_s,
            )
            for sock in sockets or []
        ]  # fmt: skip
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ServerLife:
    """From the first signal handler to the exit status. Owned by its event loop."""

    def __init__(self, config: ServeConfig, core_module: str = CORE_MODULE) -> None:
        self._config = config
        self._engine = AsyncEngine(
            config.model,
            config.engine,
            core_module=core_module,
            log_level=config.server.log_level,
        )
        self._stop = asyncio.Event()
        self._is_tls = config.server.security.tls_cert is not None
        self._grpc = grpc_server(self._engine, config.server)
        app = App(self._engine, config.server)
        self._listener = _Listener(app, config.server, tls_context(config.server.security))

    async def run(self, sock: socket.socket) -> int:
        """Serve on a bound socket until a signal or the core's death; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._receive_signal, number)
        listening = asyncio.ensure_future(self._listener.serve(sockets=[sock]))
        log.info("listening on %s", _address(sock, is_tls=self._is_tls))
        try:
            if self._grpc is not None:
                await self._grpc.start()
            status = await self._serve()
        finally:
            if self._grpc is not None:
                await self._grpc.stop(_LAST_ANSWERS_S)
            self._listener.should_exit = True
            await listening
            await self._engine.stop(0)
        log.info("bye, exit status %d", status)
        return status

    async def _serve(self) -> int:
        starting = asyncio.ensure_future(self._engine.start())
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,))
            stopping.cancel()
            return 0
        try:
            await starting
        except EngineError as error:
            stopping.cancel()
            log.error("cannot serve: %s", error)
            return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_CORE_DEAD
        self._announce()
        # Modules and routes live as long as the process: no collection has to look at them again.
        gc.collect()
        gc.freeze()
        dying = asyncio.ensure_future(self._engine.wait_dead())
        try:
            await asyncio.wait((stopping, dying), return_when=asyncio.FIRST_COMPLETED)
            if not dying.done():
                timeout_s = self._config.server.drain_timeout_s
                log.info("draining: %d requests are pending", self._engine.num_pending)
                await self._engine.drain(timeout_s)
                await self._engine.stop(0)
            if not dying.done():
                return 0
            log.critical("the core has died, so the server ends: %s", dying.result())
            # Pending requests have their 503; leave the health routes a moment to tell of it.
            await asyncio.sleep(_DEAD_LINGER_S)
            return EXIT_CORE_DEAD
        finally:
            stopping.cancel()
            dying.cancel()

    def _announce(self) -> None:
        info = self._engine.info
        log.info(
            "ready: model %s, weights %s, %s, backend %s (%s), cache %s, reuse %s: %s",
            info.name, info.weights_version, info.dtype, info.backend, info.exactness,
            info.cache_tiers, info.reuse.value, info.reuse_reason,
        )  # fmt: skip

    def _receive_signal(self, number: int) -> None:
        if self._stop.is_set():
            log.warning("a second signal: ending at once")
            self._engine.kill()
            logging.shutdown()
            os._exit(128 + number)
        log.info("received %s: no new requests are taken", signal.Signals(number).name)
        self._stop.set()


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket. Raises ConfigError if the address is taken or wrong."""
    try:
        if config.uds is not None:
            return _bind_uds(config.uds)
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        where = config.uds or f"{config.host}:{config.port}"
        reason = (error.strerror or str(error)).partition(" (while attempting")[0]
        raise ConfigError(f"cannot listen on {where}: {reason}") from error


def _bind_uds(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise OSError(errno.EADDRINUSE, "another server listens there")
            os.unlink(path)  # left behind by a server that was killed
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(path)
    sock.listen(_BACKLOG)
    return sock


def _address(sock: socket.socket, *, is_tls: bool) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    scheme = "https" if is_tls else "http"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def serve(config: ServeConfig, core_module: str = CORE_MODULE) -> int:
    """Run the server in this process until it ends; the exit status.

    Raises ConfigError when it cannot listen.
    """
    logging.basicConfig(
        level=config.server.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    access_log.configure(config.server.access_log_format)
    log.info("config: %s", to_json(config.without_keys()).decode())
    _check_early(config)
    with (
        bind(config.server) as sock,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_run(config, core_module, sock))


def _check_early(config: ServeConfig) -> None:
    """Find, before anything listens, what would be found later. Raises ConfigError."""
    if config.model is not None and not os.path.isdir(config.model):
        raise ConfigError(
            f"model directory {config.model!r} does not exist: give the folder that holds its "
            "config.json"
        )
    tls_context(config.server.security)
    warning = exposure_warning(config.server, Authenticator(config.server.security))
    if warning is not None:
        log.warning("%s", warning)


async def _run(config: ServeConfig, core_module: str, sock: socket.socket) -> int:
    return await ServerLife(config, core_module).run(sock)


if __name__ == "__main__":
    from engine.entrypoints.cli import main

    sys.exit(main(["serve", *sys.argv[1:]]))
