"""Reference-counted ids: the one place that decides when a page or a chunk may be reused.

Owners are user states, reservations and copy jobs; each holds one reference to every id it may
touch. An id returns to the free stack exactly when its last owner lets go of it. Until then it is
on the account of one weights version.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.block_manager.accounts import Account
from engine.errors import InvariantError
from engine.types import Int32Array


class RefPool:
    """Ids `[0, size)`, 8 bytes each: an int32 free stack and an int32 reference count.

    Owned by the loop thread. The ids of one call must differ; a repeated id, or one without a
    reference, raises InvariantError and changes nothing.
    """

    __slots__ = ("_free", "_name", "_num_free", "_on_freed", "_refs", "size")

    def __init__(
        self, size: int, name: str, on_freed: Callable[[Int32Array], None] | None = None
    ) -> None:
        """`on_freed` is told the ids that have just become free."""
        self.size = size
        self._on_freed = on_freed
        self._name = name
        self._refs = np.zeros(size, dtype=np.int32)
        self._free = np.arange(size - 1, -1, -1, dtype=np.int32)
        self._num_free = size

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.size - self._num_free

    def counts(self) -> Int32Array:
        """A copy of all reference counts, int32 [size]."""
        return self._refs.copy()

    def free_ids(self) -> Int32Array:
        """A copy of the free stack, int32 [num_free]."""
        return self._free[: self._num_free].copy()

    def allocate(self, count: int, account: Account) -> Int32Array:
        """`count` free ids with one reference each, int32 [count], on that account.

        The caller has checked `num_free`; asking for more is a bug (InvariantError).
        """
        if not 0 <= count <= self._num_free:
            raise InvariantError(f"{count} {self._name}s asked for, {self._num_free} are free")
        self._num_free -= count
        account.used += count
        taken = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._refs[taken] = 1
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
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)
        account.used -= len(freed)
        if self._on_freed is not None:
            self._on_freed(freed)

    def _claim(self, ids: Int32Array) -> Int32Array:
        """The counts of ids that are in use and differ from each other."""
        counts = self._refs[ids]
        if counts.min() < 1:
            unowned = int(ids[int(counts.argmin())])
            raise InvariantError(f"{self._name} {unowned} has no owner (double release?)")
        # Writing each id's place and reading it back shows repeated ids without another array.
        places = np.arange(len(ids), dtype=np.int32)
        self._refs[ids] = places
        is_repeated = self._refs[ids] != places
        if is_repeated.any():
            self._refs[ids] = counts
            repeated = int(ids[int(is_repeated.argmax())])
            raise InvariantError(f"{self._name} {repeated} appears twice in one call")
        return counts
