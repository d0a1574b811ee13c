"""One user's state: two prefixes, the pages and chunks that hold them, and its residency.

How residency works. A user without page and chunk has no state (ABSENT). Reserving a piece pins
the state: nobody may take its pages until the piece is committed or released. Forgetting or
refreshing a user *detaches* the state: it is found no more, what it held is released, and what a
running step (DETACHED: the state keeps its pages) or a copy (LEAVING) still touches stays out of
use until that ends. A state that lost its last page and chunk leaves the same way.

    ABSENT --pin--> PINNED <--pin/unpin--> RESIDENT
                    PINNED --detach--> DETACHED --unpin--> LEAVING --drain--> ABSENT
                                       RESIDENT --detach--> LEAVING

Pages are clean below `host_len` and dirty above; no page carries a flag.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeVar

import numpy as np

from engine.block_manager.accounts import VersionAccounts
from engine.block_manager.page_pool import NO_IDS
from engine.transitions import next_state
from engine.types import Int32Array, Uint64Array


class UserKey(NamedTuple):
    """What a state is found by; the fingerprint then verifies it.

    private_to: 0, or the number of the only request that may see the state: it is dropped with the
    request, never offloaded, and `forget` leaves it alone.
    """

    namespace: str
    user_id: str
    weights_version: str
    private_to: int = 0


class Residency(Enum):
    """Where a state stands."""

    __hash__ = object.__hash__  # of a member, which is there once; Enum's own is a Python call

    ABSENT = "absent"
    RESIDENT = "resident"
    PINNED = "pinned"
    DETACHED = "detached"
    LEAVING = "leaving"


class Event(Enum):
    """What happens to a state."""

    __hash__ = object.__hash__

    PIN = "pin"
    UNPIN = "unpin"
    DETACH = "detach"
    DRAIN = "drain"


TRANSITIONS: dict[tuple[Residency, Event], Residency] = {
    (Residency.ABSENT, Event.PIN): Residency.PINNED,
    (Residency.RESIDENT, Event.PIN): Residency.PINNED,
    (Residency.PINNED, Event.UNPIN): Residency.RESIDENT,
    (Residency.PINNED, Event.DETACH): Residency.DETACHED,
    (Residency.RESIDENT, Event.DETACH): Residency.LEAVING,
    (Residency.DETACHED, Event.UNPIN): Residency.LEAVING,
    (Residency.LEAVING, Event.DRAIN): Residency.ABSENT,
}

Array = TypeVar("Array", Int32Array, Uint64Array)
_NO_HASHES = np.zeros(0, dtype=np.uint64)


class UserView(NamedTuple):
    """A copy of what is known about one user, for reports and tests. Lengths in tokens.

    length: max(device_len, host_len). fingerprint: the hash at `length`. branch: rises at every
    divergence. last_used_s: when a piece was planned last, monotonic seconds.
    """

    device_len: int
    host_len: int
    length: int
    fingerprint: int
    num_pages: int
    num_chunks: int
    branch: int
    residency: Residency
    is_copying: bool
    weights_version: str
    last_used_s: float


@dataclass(slots=True, eq=False)
class UserState:
    """Owned by the block manager (loop thread). Compared and hashed by identity.

    Attributes:
        accounts: Whose quota its pages and chunks count against.
        turn: Number of the pin that touched it last; a later one is higher, over all states.
        last_used_s: When that was, monotonic seconds.
        device_len: Tokens on the device, from the start. Ends inside a page only at `length`.
        host_len: Tokens in host memory, from the start; whole pages.
        offload_len: Tokens handed to offload on this branch, >= host_len; equal to it when no
            offload of this branch is in flight.
        used_len: Tokens of the device prefix that a request has used; pages beyond were
            prefetched and nobody has read them yet.
        branch: Raised at every divergence; copies of an older branch count for nothing.
        tail_hash: Hash at `length` when that lies inside a page, else 0.
    """

    key: UserKey
    accounts: VersionAccounts
    residency: Residency = Residency.ABSENT
    turn: int = 0
    last_used_s: float = 0.0
    device_len: int = 0
    host_len: int = 0
    offload_len: int = 0
    used_len: int = 0
    branch: int = 0
    tail_hash: int = 0
    num_pages: int = 0
    num_chunks: int = 0
    num_hashes: int = 0
    _pages: Int32Array = field(default_factory=lambda: NO_IDS)
    _chunks: Int32Array = field(default_factory=lambda: NO_IDS)
    _hashes: Uint64Array = field(default_factory=lambda: _NO_HASHES)

    def __str__(self) -> str:
        return f"the state of user {self.key.user_id!r}"

    def fire(self, event: Event) -> None:
        """Take a transition; a pair that is not in the table is a bug (InvariantError)."""
        self.residency = next_state(TRANSITIONS, self.residency, event, self)

    @property
    def is_attached(self) -> bool:
        """The state is found by its key; False once it was forgotten or refreshed."""
        return self.residency is Residency.RESIDENT or self.residency is Residency.PINNED

    @property
    def length(self) -> int:
        """Tokens known in any tier."""
        return self.device_len if self.device_len > self.host_len else self.host_len

    @property
    def pages(self) -> Int32Array:
        """int32 [num_pages], a view: device pages of the sequence in order."""
        return self._pages[: self.num_pages]

    @property
    def chunks(self) -> Int32Array:
        """int32 [num_chunks], a view: chunks of the offloaded prefix in order."""
        return self._chunks[: self.num_chunks]

    @property
    def hashes(self) -> Uint64Array:
        """uint64 [length // page_size], a view: hashes at page boundaries."""
        return self._hashes[: self.num_hashes]

    def append_pages(self, pages: Int32Array) -> None:
        end = self.num_pages + len(pages)
        self._pages = _grown(self._pages, self.num_pages, end)
        self._pages[self.num_pages : end] = pages
        self.num_pages = end

    def append_chunks(self, chunks: Int32Array) -> None:
        end = self.num_chunks + len(chunks)
        self._chunks = _grown(self._chunks, self.num_chunks, end)
        self._chunks[self.num_chunks : end] = chunks
        self.num_chunks = end

    def append_hashes(self, hashes: Uint64Array) -> None:
        end = self.num_hashes + len(hashes)
        self._hashes = _grown(self._hashes, self.num_hashes, end)
        self._hashes[self.num_hashes : end] = hashes
        self.num_hashes = end

    def cut_pages(self, count: int) -> Int32Array:
        """Keep `count` pages; the pages that went, int32, the caller's to release."""
        gone = self._pages[count : self.num_pages].copy()
        self.num_pages = min(self.num_pages, count)
        self._pages = _shrunk(self._pages, self.num_pages)
        return gone

    def cut_chunks(self, count: int) -> Int32Array:
        """Keep `count` chunks; the chunks that went, int32, the caller's to release."""
        gone = self._chunks[count : self.num_chunks].copy()
        self.num_chunks = min(self.num_chunks, count)
        self._chunks = _shrunk(self._chunks, self.num_chunks)
        return gone

    def cut_hashes(self, count: int) -> None:
        """Keep the hashes of `count` pages."""
        self.num_hashes = min(self.num_hashes, count)
        self._hashes = _shrunk(self._hashes, self.num_hashes)

    def drop_pages(self) -> Int32Array:
        """Hold no page; the pages, the caller's to release."""
        pages = self.pages
        self.num_pages = 0
        self._pages = NO_IDS
        return pages

    def empty(self) -> Int32Array:
        """Know nothing, and hold nothing but pages; the chunks, the caller's to release."""
        chunks = self.chunks
        self.device_len = self.host_len = self.offload_len = self.used_len = 0
        self.num_chunks = self.num_hashes = 0
        self._chunks = NO_IDS
        self._hashes = _NO_HASHES
        return chunks

    def array_bytes(self) -> int:
        """Bytes of the arrays' contents, spare room included."""
        return self._pages.nbytes + self._chunks.nbytes + self._hashes.nbytes


def _grown(array: Array, used: int, needed: int) -> Array:
    """Room for `needed` entries: an eighth more at every growth after the first."""
    if needed <= len(array):
        return array
    room = needed + needed // 8 if used else needed
    larger = np.empty(room, dtype=array.dtype)
    larger[:used] = array[:used]
    return larger


def _shrunk(array: Array, used: int) -> Array:
    """The same entries without the spare room, once that is more than half."""
    return array if 2 * used >= len(array) else array[:used].copy()
