"""The core in a process of its own: `python -m engine.core_process --fd N --parent PID`.

Started by module name with the same interpreter, so a host script needs no main guard. The main
thread runs the core's loop. Two more threads guard it: one waits for the front's end of the socket
to close and ends the process at once when it does, so no core outlives its front, whatever either
of them is doing; the other ends the process when the loop has not made a pass for
`health.heartbeat_kill_s`, after logging what the core was doing.

SIGUSR1 writes the stacks of all threads to standard error. That works also when the interpreter is
stuck inside C code; it does not when the process is stopped (SIGSTOP) or waits in the kernel.

Exit status: 0 after Shutdown, 1 when the core could not start, 70 after a bug or a hung step,
71 without a front, 72 when the loop hung.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.core_loop import EXIT_ORPHAN, CoreFace, CoreFactory, CoreLoop, serve_core
from engine.core_watch import SilenceWatch

EXIT_HUNG = 72

_PARENT_CHECK_S = 1.0
_LOOP_CHECK_S = 0.5

log = logging.getLogger("engine.core_process")


def watch_front(sock: socket.socket, parent_pid: int) -> None:
    """End this process as soon as the front's end of the socket is closed. Never returns."""
    poller = select.poll()
    poller.register(sock.fileno(), 0)  # hang-ups are always reported
    while os.getppid() == parent_pid:
        if poller.poll(_PARENT_CHECK_S * 1000):
            break
    os._exit(EXIT_ORPHAN)


def watch_loop(loop: CoreLoop, limit_s: float) -> None:
    """End this process when the loop has made no pass for `limit_s`. Never returns."""
    watch = SilenceWatch(limit_s, _LOOP_CHECK_S)
    while not watch.is_over(time.monotonic(), loop.last_pass_s):
        time.sleep(_LOOP_CHECK_S)
    log.critical("the core's loop has made no pass for more than heartbeat_kill_s=%g", limit_s)
    loop.dump()
    logging.shutdown()
    os._exit(EXIT_HUNG)


def _start_serving(loop: CoreLoop, config: EngineConfig) -> None:
    """Last preparations of the process before its core says that it is ready."""
    # What start-up has made lives as long as the process. Without this every full collection walks
    # all of it again: 170,000 objects, mostly torch's, 0.1 s and more with the loop standing still.
    gc.collect()
    gc.freeze()
    limit_s = config.health.heartbeat_kill_s
    if limit_s:
        threading.Thread(
            target=watch_loop, args=(loop, limit_s), name="watch-loop", daemon=True
        ).start()


def run_process(build: CoreFactory, arguments: Sequence[str] | None = None) -> int:
    """Body of a core process: parse the arguments, guard, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
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
    return serve_core(sock, build, on_serving=_start_serving)


def build(model_dir: str | None, config: EngineConfig) -> CoreFace:
    """The real core; what `CoreFactory` is for the modules that tests put in."""
    from engine.assembly import core_from_model_dir  # torch: only once the guard has started

    return core_from_model_dir(model_dir, config)


if __name__ == "__main__":
    # os._exit: interpreter shutdown would wait for threads that no longer matter.
    status = run_process(build)
    logging.shutdown()
    os._exit(status)
