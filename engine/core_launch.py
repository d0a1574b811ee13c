"""Start a core, in a process or in a thread, and hold the front's end of its socket.

Both run the same loop over the same socket pair (`core_loop`), so they do the same. What differs
is what can be done to them: a process can be killed, a thread cannot.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec

from engine.core_loop import CoreFactory, serve_core
from engine.core_watch import thread_stacks

CORE_MODULE = "engine.core_process"

SLEEP_WHEN_IDLE = "PASSIVE"
"""OMP_WAIT_POLICY unless the user has set one: threads that wait for each other sleep. By default
they spin, and where other processes want the same cores (the front, clients) a step of many small
operations then takes many times longer."""

CorePlace = Literal["process", "thread"]

log = logging.getLogger(__name__)


class CoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a core is started and ended.

    Attributes:
        place: A process of its own, or a thread of this one.
        module: Module whose `build` makes the core; as a process, `python -m module` runs it.
        log_level: Of a core process, which logs to standard error; a thread logs as the host does.
        exit_timeout_s: How long a core that was told to end may take; then a process is killed.
    """

    place: CorePlace = "process"
    module: str = CORE_MODULE
    log_level: str = "INFO"
    exit_timeout_s: float = 10.0


class CoreHandle(Protocol):
    """A core that was started. `str()` says what it is, for messages."""

    @property
    def pid(self) -> int | None:
        """Its process id; None when it has no process of its own."""

    def is_running(self) -> bool: ...

    def wait(self, timeout_s: float) -> bool:
        """Block until it has ended; False if it has not within `timeout_s`."""

    def kill(self) -> None:
        """End it at once, without any answer. A thread ends with its next pass, if there is one."""

    def dump_stacks(self) -> None:
        """Let the stacks of its threads be logged; returns before they are."""


class ProcessCore(CoreHandle):
    """A core in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def __str__(self) -> str:
        return f"core process {self._process.pid}"

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        if self.is_running():
            self._process.kill()

    def dump_stacks(self) -> None:
        self._process.send_signal(signal.SIGUSR1)


class ThreadCore(CoreHandle):
    """A core in a thread of this process, a daemon: it does not keep the interpreter alive."""

    def __init__(self, build: CoreFactory, sock: socket.socket) -> None:
        self._build = build
        self._sock = sock
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return f"core thread {self._thread.name!r}"

    @property
    def pid(self) -> int | None:
        return None

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def kill(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("the socket of the %s is closed already", self)

    def dump_stacks(self) -> None:
        log.critical("stacks of this process\n%s", thread_stacks())

    def _run(self) -> None:
        with self._sock:
            serve_core(self._sock, self._build, process_goes_on=True)


class LaunchedCore(NamedTuple):
    """A core that waits for its start message, and the front's end of the socket."""

    handle: CoreHandle
    sock: socket.socket


def launch_core(options: CoreOptions) -> LaunchedCore:
    """Start a core on one end of a new socket pair.

    A process gets a group of its own, so that signals from a terminal or a supervisor reach the
    front only, which then drains. A core ends when the front's end of the socket is closed.
    """
    front_end, core_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if options.place == "process":
            with core_end:
                return LaunchedCore(_start_process(options, core_end), front_end)
        build: CoreFactory = importlib.import_module(options.module).build
        return LaunchedCore(ThreadCore(build, core_end), front_end)
    except BaseException:
        front_end.close()
        core_end.close()
        raise


def _start_process(options: CoreOptions, core_end: socket.socket) -> ProcessCore:
    command = [
        sys.executable, "-P", "-m", options.module, "--fd", str(core_end.fileno()),
        "--parent", str(os.getpid()), "--log-level", options.log_level,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=[core_end.fileno()],
        env=_environment(),
        process_group=0,
    )
    return ProcessCore(process)


def _environment() -> dict[str, str]:
    """The environment, with this copy of the package importable (-P hides the working folder)."""
    environment = dict(os.environ)
    environment.setdefault("OMP_WAIT_POLICY", SLEEP_WHEN_IDLE)
    root = Path(__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else str(root)
    return environment
