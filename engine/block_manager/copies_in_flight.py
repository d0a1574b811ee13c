"""The copies that may still touch bytes, and the references that keep those bytes from reuse."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.block_manager.page_pool import RefPool
from engine.block_manager.reservation import Reservation
from engine.block_manager.user_state import UserState
from engine.errors import InvariantError
from engine.transfer.jobs import CopyEngine, CopyJob, Direction
from engine.types import Int32Array


@dataclass(slots=True, eq=False, kw_only=True)
class CopyRecord:
    """One job in flight. Owned by `CopiesInFlight`.

    Attributes:
        state: The user state the job belongs to.
        chunks: int32, the chunks it touches.
        reservation: The open reservation that waits for it; None for an offload, and once the
            reservation has ended.
        pages_done: As last reported.
        is_wasted: Its reservation was released without it: the bytes serve nobody.
        is_failure_counted: It was late, and counted so.
    """

    state: UserState
    chunks: Int32Array
    reservation: Reservation | None = None
    pages_done: int = 0
    is_wasted: bool = False
    is_failure_counted: bool = False


class CopiesInFlight:
    """Jobs from the moment they are made until nothing touches their bytes.

    Each holds a reference to its pages and chunks. Owned by the loop thread.
    """

    __slots__ = ("_by_state", "_chunks", "_copies", "_pages", "_records")

    def __init__(self, pages: RefPool, chunks: RefPool, copies: CopyEngine) -> None:
        self._pages = pages
        self._chunks = chunks
        self._copies = copies
        self._records: dict[CopyJob, CopyRecord] = {}
        self._by_state: dict[UserState, list[CopyJob]] = {}

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_onloads(self) -> int:
        return sum(job.direction is Direction.ONLOAD for job in self._records)

    def records(self) -> Iterable[tuple[CopyJob, CopyRecord]]:
        return self._records.items()

    def is_copying(self, state: UserState) -> bool:
        """A job of this state (of any branch) may still touch bytes."""
        return state in self._by_state

    def has_only_offloads(self, state: UserState) -> bool:
        jobs = self._by_state.get(state, ())
        return all(job.direction is Direction.OFFLOAD for job in jobs)

    def record(self, job: CopyJob) -> CopyRecord:
        """The record of a job in flight; a job that is not is a bug (InvariantError)."""
        record = self._records.get(job)
        if record is None:
            raise InvariantError(f"{job.direction.value} job {job.handle} is not in flight")
        return record

    def find(self, job: CopyJob) -> CopyRecord | None:
        return self._records.get(job)

    def open(self, job: CopyJob, record: CopyRecord) -> None:
        """The job may touch its pages and chunks from now on."""
        self._pages.retain(job.pages)
        self._chunks.retain(record.chunks)
        self._records[job] = record
        self._by_state.setdefault(record.state, []).append(job)

    def close(self, job: CopyJob) -> None:
        """Nothing touches the job's bytes any more."""
        record = self._records.pop(job)
        jobs = self._by_state[record.state]
        jobs.remove(job)
        if not jobs:
            del self._by_state[record.state]
        accounts = record.state.accounts
        self._pages.release(job.pages, accounts.device)
        self._chunks.release(record.chunks, accounts.host)

    def cancel(self, job: CopyJob) -> bool:
        """Close a job that has not started. False: it has, and its end will be reported.

        A job whose handle is still negative was never submitted, and must not be any more.
        """
        if job.handle >= 0 and not self._copies.cancel(job):
            return False
        self.close(job)
        return True

    def cancel_offloads(self, state: UserState) -> list[CopyJob]:
        """Cancel the state's offloads that have not started, the newest first."""
        cancelled = []
        for job in reversed(self._by_state.get(state, [])[:]):
            if job.direction is Direction.OFFLOAD:
                if not self.cancel(job):
                    break  # jobs of one direction start in order: the older ones have started too
                cancelled.append(job)
        return cancelled
