"""A core whose copies fail now and then: `python -m tests.chaos.faulty_core`."""

from __future__ import annotations

import os
import random
import sys

from engine.assembly import Hooks, core_from_model_dir
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.core_process import run_process
from engine.testing.fakes import FaultyCopyEngine
from engine.transfer.jobs import CopyEngine, CopyJob, CopyProgress

FAILING = 0.02


class RandomFaults:
    """A copy engine of which one job in fifty fails, after some of its pages."""

    def __init__(self, inner: CopyEngine) -> None:
        self._copies = FaultyCopyEngine(inner)
        self._random = random.Random(os.getpid())

    def submit(self, job: CopyJob) -> None:
        if self._random.random() < FAILING:
            after_pages = self._random.randrange(job.num_pages + 1)
            self._copies.fail_nth(1, job.direction, after_pages=after_pages)
        self._copies.submit(job)
        self._copies.submitted.clear()  # a long run must not remember every job

    def cancel(self, job: CopyJob) -> bool:
        return self._copies.cancel(job)

    def poll(self) -> list[CopyProgress]:
        return self._copies.poll()

    def wait_layer(self, job: CopyJob, layer: int, deadline_s: float) -> bool:
        return self._copies.wait_layer(job, layer, deadline_s)

    def close(self) -> None:
        self._copies.close()


def build(model_dir: str | None, config: EngineConfig) -> EngineCore:
    return core_from_model_dir(model_dir, config, Hooks(wrap_copies=RandomFaults))


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(run_process(build))
