"""A job: one transfer of whole pages between the device pool and the host arena.

The block manager describes jobs (metadata only); a copy engine moves the bytes. An onload works
layer by layer over all its pages, so that the layer loop can follow it; an offload works through
its pages in order, a few at a time in all layers, so that `host_len` can rise before it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from engine.types import Int32Array


class Direction(Enum):
    """Where the bytes go."""

    ONLOAD = "onload"
    OFFLOAD = "offload"


@dataclass(slots=True, eq=False, kw_only=True)
class CopyJob:
    """Pages `first_page .. first_page + n` of one user's sequence.

    Attributes:
        pages: int32 [n], device page ids.
        host_slots: int32 [n], chunk id * pages_per_chunk + page within the chunk.
        owner, branch: The user state the job belongs to and that state's branch number when the
            job was made; opaque to the copy engine.
        started_s: Monotonic seconds at submission.
        handle: The copy engine's own number.
        succeeded: Set by the copy engine when the job's end is polled (or it is cancelled); None
            until then. The device thread may still ask for layers of a job that has ended.
    """

    direction: Direction
    first_page: int
    pages: Int32Array
    host_slots: Int32Array
    owner: object
    branch: int
    started_s: float = 0.0
    handle: int = -1
    succeeded: bool | None = None

    @property
    def num_pages(self) -> int:
        return len(self.pages)


class CopyProgress(NamedTuple):
    """What happened to a job since the last poll.

    pages_done: whole pages complete in all layers, counted from the job's first page (an onload
    reports 0 until it is complete). is_finished: nothing will touch its bytes any more. error:
    None, or why it failed (then is_finished).
    """

    job: CopyJob
    pages_done: int
    is_finished: bool
    error: str | None


class CopyEngine(Protocol):
    """Moves bytes in the background. Jobs of one direction run in order of submission."""

    def submit(self, job: CopyJob) -> None:
        """Take a whole job; returns at once."""

    def cancel(self, job: CopyJob) -> bool:
        """True: the job had not started and never will; nothing was touched, and poll is silent
        about it. False: it has started or ended; poll reports its end."""

    def poll(self) -> list[CopyProgress]:
        """Progress since the last call, in order of completion. Called by the core only."""

    def wait_layer(self, job: CopyJob, layer: int, deadline_s: float) -> bool:
        """Block (without the GIL) until the onload's pages are there in that layer.

        False when the job failed or monotonic `deadline_s` passed. Called by the device thread.
        """

    def close(self) -> None:
        """Drop jobs that have not started, wait for the others, stop the threads."""
