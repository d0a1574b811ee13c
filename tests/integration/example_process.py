"""An example of `examples/` as a process of its own, until it has said that it listens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.integration.server_process import ROOT, eventually


class ExampleProcess:
    """Started on entry, with a process group of its own that is killed on exit.

    Args:
        folder: Where its output is kept.
        arguments: Of the interpreter.
        announcement: Pattern of what it prints once it takes requests; group 1 is its port.
    """

    def __init__(
        self,
        folder: Path,
        arguments: list[str],
        announcement: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log_path = folder / "example.log"
        self._arguments = arguments
        self._announcement = announcement
        self._environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {}),
        }  # fmt: skip
        self.address = ""

    def __enter__(self) -> Self:
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self._arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=self._environment,
                process_group=0,
            )
        try:
            eventually(
                lambda: re.search(self._announcement, self.log) or self.process.poll() is not None,
                "the example listens",
                timeout_s=110,
            )
            found = re.search(self._announcement, self.log)
            assert found is not None, self.log
        except BaseException:
            self._kill()
            raise
        self.address = f"http://127.0.0.1:{found[1]}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._kill()

    def _kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log_path.read_text(errors="replace")

    def children(self) -> list[int]:
        """Process ids of its children."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return [
            int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()
        ]

    def stop(self, number: signal.Signals, timeout_s: float = 60.0) -> int:
        """Send the signal and wait for the end; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)
