"""Reference-counted ids: the one place that decides when a page or a chunk may be reused.

Owners are user states, reservations and copy jobs. A page belongs to one state or to one piece
(`Reservation.num_shared` says which), a chunk to one state; every copy in flight holds one
reference more to all that it touches. An id is free exactly when its last owner lets go of it.
Until then it is on the account of one weights version.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.block_manager.accounts import Account
from engine.errors import InvariantError
from engine.types import Int32Array

Int16Array = NDArray[np.int16]
NO_IDS: Int32Array = np.zeros(0, dtype=np.int32)


class RefPool:
    """Ids `[0, size)`, 2 bytes each: an int16 reference count (one, and the copies in flight).

    The ids from `_first_unused` on were never in use; those freed since are on an int32 stack, of
    which only the part that was ever filled costs memory. Owned by the loop thread. The ids of one
    call must differ; a repeated id, or one without a reference, raises InvariantError and changes
    nothing.
    """

    __slots__ = ("_first_unused", "_freed", "_name", "_num_freed", "_on_freed", "_refs", "size")

    def __init__(
        self, size: int, name: str, on_freed: Callable[[Int32Array], None] | None = None
    ) -> None:
        """`on_freed` is told the ids that have just become free."""
        self.size = size
        self._on_freed = on_freed
        self._name = name
        self._refs = np.zeros(size, dtype=np.int16)
        self._first_unused = 0
        self._freed = np.empty(size, dtype=np.int32)
        self._num_freed = 0

    @property
    def num_free(self) -> int:
        return self._num_freed + self.size - self._first_unused

    @property
    def num_used(self) -> int:
        return self._first_unused - self._num_freed

    def counts(self) -> Int16Array:
        """A copy of all reference counts, int16 [size]."""
        return self._refs.copy()

    def free_ids(self) -> Int32Array:
        """The free ids, int32 [num_free]."""
        unused = np.arange(self._first_unused, self.size, dtype=np.int32)
        return np.concatenate((self._freed[: self._num_freed], unused))

    def allocate(self, count: int, account: Account) -> Int32Array:
        """`count` free ids with one reference each, int32 [count], on that account.

        The caller has checked `num_free`; asking for more is a bug (InvariantError).
        """
        if not 0 <= count <= self.num_free:
            raise InvariantError(f"{count} {self._name}s asked for, {self.num_free} are free")
        if count == 0:
            return NO_IDS
        freed_before, first = self._num_freed, self._first_unused
        self._num_freed = max(0, freed_before - count)
        self._first_unused = first + count - (freed_before - self._num_freed)
        reused = self._freed[self._num_freed : freed_before][::-1]
        unused = np.arange(first, self._first_unused, dtype=np.int32)
        taken = np.concatenate((reused, unused))
        self._refs[taken] = 1
        account.used += count
        return taken

    def retain(self, ids: Int32Array) -> None:
        """One more owner for each of the ids, all of them in use already."""
        if len(ids) == 0:
            return
        counts = self._claim(ids)
        self._refs[ids] = counts + 1

    def release(self, ids: Int32Array, account: Account) -> None:
        """One owner less for each of the ids, all on that account; those without any are free."""
        if len(ids) == 0:
            return
        counts = self._claim(ids)
        self._refs[ids] = counts - 1
        freed = ids[counts == 1]
        self._freed[self._num_freed : self._num_freed + len(freed)] = freed
        self._num_freed += len(freed)
        account.used -= len(freed)
        if self._on_freed is not None:
            self._on_freed(freed)

    def _claim(self, ids: Int32Array) -> Int16Array:
        """The counts of ids that are in use and differ from each other."""
        counts = self._refs[ids]
        if counts.min() < 1:
            unowned = int(ids[int(counts.argmin())])
            raise InvariantError(f"{self._name} {unowned} has no owner (double release?)")
        ordered = np.sort(ids)
        is_repeated = ordered[1:] == ordered[:-1]
        if is_repeated.any():
            repeated = int(ordered[int(is_repeated.argmax())])
            raise InvariantError(f"{self._name} {repeated} appears twice in one call")
        return counts
