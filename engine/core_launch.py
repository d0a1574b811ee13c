"""Start a core process and hold the front's end of its socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

CORE_MODULE = "engine.core_process"

SLEEP_WHEN_IDLE = "PASSIVE"
"""OMP_WAIT_POLICY unless the user has set one: threads that wait for each other sleep. By default
they spin, and where other processes want the same cores (the front, clients) a step of many small
operations then takes many times longer."""


class LaunchedCore(NamedTuple):
    """A core process that waits for its start message, and the front's end of the socket."""

    process: subprocess.Popen[bytes]
    sock: socket.socket


def launch_core(module: str = CORE_MODULE, log_level: str = "INFO") -> LaunchedCore:
    """Start `python -m module` on one end of a new socket pair.

    The process gets a group of its own, so that signals from a terminal or a supervisor reach the
    front only, which then drains. It ends when the front's end of the socket is closed.
    """
    front_end, core_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with core_end:
        command = [
            sys.executable, "-P", "-m", module, "--fd", str(core_end.fileno()),
            "--parent", str(os.getpid()), "--log-level", log_level,
        ]  # fmt: skip
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[core_end.fileno()],
                env=_environment(),
                process_group=0,
            )
        except BaseException:
            front_end.close()
            raise
    return LaunchedCore(process, front_end)


def _environment() -> dict[str, str]:
    """The environment, with this copy of the package importable (-P hides the working folder)."""
    environment = dict(os.environ)
    environment.setdefault("OMP_WAIT_POLICY", SLEEP_WHEN_IDLE)
    root = Path(__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else str(root)
    return environment
