"""A server that is started again whenever it ends, as a supervisor does; and what it weighs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_SERVER = """
import sys
from engine.entrypoints import api_server, cli
config = cli.serve_config(cli.Arguments(sys.argv[1:], None))
sys.exit(api_server.serve(config, core_module="tests.chaos.faulty_core"))
"""


class Weight(NamedTuple):
    """Resident bytes of a server and its core, and how long that core has lived."""

    age_s: float
    front_bytes: int
    core_bytes: int


class Life(NamedTuple):
    """One life of the server: the weights it was seen with, and its exit status."""

    weights: list[Weight]
    status: int


class Supervisor:
    """Runs the server until `stop`. Owned by the event loop."""

    def __init__(self, flags: list[str], log: Path) -> None:
        self.port = _free_port()
        self.lives: list[Life] = []
        self.num_kills = 0
        self._flags = flags
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False

    async def run(self) -> None:
        """Start the server, and again whenever it ends."""
        loop = asyncio.get_running_loop()
        with self._log.open("ab") as log:
            while not self._is_stopping:
                started_s = loop.time()
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", _SERVER, "--port", str(self.port), *self._flags,
                    cwd=ROOT, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)},
                )  # fmt: skip
                weights: list[Weight] = []
                ending = asyncio.ensure_future(self._process.wait())
                while not ending.done():
                    await asyncio.wait((ending,), timeout=1.0)
                    weight = self._weigh(loop.time() - started_s)
                    if weight is not None:
                        weights.append(weight)
                self.lives.append(Life(weights, ending.result()))

    def kill_core(self) -> None:
        """SIGKILL to the core of a server that has one."""
        core = self._core()
        if core is not None:
            self.num_kills += 1
            os.kill(core, signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, and no new start."""
        self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def _core(self) -> int | None:
        if self._process is None or self._process.returncode is not None:
            return None
        try:
            tasks = list(Path(f"/proc/{self._process.pid}/task").iterdir())
            children = [
                int(pid) for task in tasks for pid in (task / "children").read_text().split()
            ]
        except OSError:
            return None
        return children[0] if children else None

    def _weigh(self, age_s: float) -> Weight | None:
        core = self._core()
        if core is None or self._process is None:
            return None
        front_bytes, core_bytes = _resident(self._process.pid), _resident(core)
        if front_bytes is None or core_bytes is None:
            return None
        return Weight(age_s, front_bytes, core_bytes)


def _resident(pid: int) -> int | None:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
