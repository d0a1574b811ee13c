"""The rolling fingerprint: how a state is verified against a request's history.

The records of a history are hashed page by page, each page seeded with the hash of everything
before it:

    h[0] = xxh3_64(seed)
    h[i + 1] = xxh3_64(bytes of page i's records, seed=h[i])

so `h[i]` stands for the seed and the first `i * page_size` records, and two histories share a
prefix of whole pages exactly as far as their hashes agree. A length inside a page is hashed the
same way from the last boundary. A length match alone is never trusted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from engine.errors import InvariantError
from engine.types import Int64Array

Uint64Array = NDArray[np.uint64]


class HashChain:
    """The fingerprints of one request's history.

    Attributes:
        length: L, records hashed.
        page_size: Records a page.
        boundaries: uint64 [L // page_size]; entry i is the hash of the first (i + 1) * page_size
            records. Not to be modified.
    """

    __slots__ = ("_raw", "_row_bytes", "_start", "boundaries", "length", "page_size")

    def __init__(
        self,
        *,
        length: int,
        page_size: int,
        boundaries: Uint64Array,
        raw: memoryview,
        row_bytes: int,
        start: int,
    ) -> None:
        self.length = length
        self.page_size = page_size
        self.boundaries = boundaries
        self._raw = raw
        self._row_bytes = row_bytes
        self._start = start

    @classmethod
    def from_records(cls, records: Int64Array, seed: bytes, page_size: int) -> HashChain:
        """Hash `records` int64 [L, W]. They are kept by reference and must not change."""
        rows = np.ascontiguousarray(records)
        length = len(rows)
        raw = rows.reshape(-1).view(np.uint8).data
        row_bytes = rows.itemsize * (rows.size // length) if length else 0
        start = xxh3_64_intdigest(seed)
        step = page_size * row_bytes
        rolling = start
        hashes = []
        for begin in range(0, (length // page_size) * step, step or 1):
            rolling = xxh3_64_intdigest(raw[begin : begin + step], rolling)
            hashes.append(rolling)
        return cls(
            length=length,
            page_size=page_size,
            boundaries=np.array(hashes, dtype=np.uint64),
            raw=raw,
            row_bytes=row_bytes,
            start=start,
        )

    def at(self, length: int) -> int:
        """The hash of the first `length` records, 0 <= length <= L."""
        if not 0 <= length <= self.length:
            raise InvariantError(f"no fingerprint at {length} of a history of {self.length}")
        pages, rest = divmod(length, self.page_size)
        boundary = int(self.boundaries[pages - 1]) if pages else self._start
        if rest == 0:
            return boundary
        begin = pages * self.page_size * self._row_bytes
        return xxh3_64_intdigest(self._raw[begin : length * self._row_bytes], boundary)


class Match(NamedTuple):
    """How a history compares with a state.

    matched: tokens in common that can be used. is_prefix: the history is shorter than the state
    and all of its own whole pages match, so the state stays. diverges: the state is another
    history beyond `matched`.
    """

    matched: int
    is_prefix: bool
    diverges: bool


NO_MATCH = Match(matched=0, is_prefix=False, diverges=False)


def match(hashes: Uint64Array, length: int, tail_hash: int, chain: HashChain) -> Match:
    """Compare a state with a request's history.

    hashes: uint64 [length // page_size], the state's page boundaries. tail_hash: the state's hash
    at `length`; read only when that lies inside a page.
    """
    page_size = chain.page_size
    common = min(len(hashes), len(chain.boundaries))
    equal = hashes[:common] == chain.boundaries[:common]
    if not equal.all():
        return Match(matched=int(equal.argmin()) * page_size, is_prefix=False, diverges=True)
    if chain.length < length:
        return Match(matched=common * page_size, is_prefix=True, diverges=False)
    if length % page_size == 0 or chain.at(length) == tail_hash:
        return Match(matched=length, is_prefix=False, diverges=False)
    return Match(matched=common * page_size, is_prefix=False, diverges=True)
