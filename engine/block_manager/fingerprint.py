"""The rolling fingerprint: how a state is verified against a request's history.

The records of a history are hashed page by page, each page seeded with the hash of everything
before it:

    h[0] = xxh3_64(seed)
    h[i + 1] = xxh3_64(bytes of page i's records, seed=h[i])

so `h[i]` stands for the seed and the first `i * page_size` records, and two histories share a
prefix of whole pages exactly as far as their hashes agree. A length inside a page is hashed the
same way from the last boundary. A length match alone is never trusted.

A delta request does not send the records below its *base*, a page boundary. Its chain is given the
hash there and rolls on from it; what lies below is not known and never read. Such a chain matches a
state only if the state has that very hash at that very boundary. On the wire a base is
`BaseFingerprint`: the hash of the seed too, so that a delta with another profile or other weights
is told apart.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self

import numpy as np
from xxhash import xxh3_64_intdigest

from engine.block_manager.page_hashes import hash_pages
from engine.errors import InvalidRequest, InvariantError
from engine.types import Int64Array, Uint64Array

_BASE_TEXT = re.compile(r"[0-9a-f]{32}")


class BaseFingerprint(NamedTuple):
    """What a delta request must show of the history it extends.

    seed: hash of the seed (contextual features, weights version). boundary: hash at the base.
    """

    seed: int
    boundary: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The fingerprint that an answer gave. Raises InvalidRequest for any other text."""
        if _BASE_TEXT.fullmatch(text) is None:
            raise InvalidRequest(
                f"base_fingerprint is {text!r:.60}: give the 32 hex digits of an earlier answer's "
                "`fingerprint`"
            )
        return cls(int(text[:16], 16), int(text[16:], 16))

    def __str__(self) -> str:
        """32 hex digits."""
        return f"{self.seed:016x}{self.boundary:016x}"


class HashChain:
    """The fingerprints of one request's history.

    Attributes:
        length: L, records hashed.
        page_size: Records a page.
        base_pages: Pages below the base of a delta request, whose records are not known; else 0.
        boundaries: uint64 [L // page_size]; entry i is the hash of the first (i + 1) * page_size
            records. Entries below base_pages - 1 mean nothing. Not to be modified.
    """

    __slots__ = ("_rows", "_start", "base_pages", "boundaries", "length", "page_size")

    def __init__(
        self,
        *,
        length: int,
        page_size: int,
        boundaries: Uint64Array,
        rows: Int64Array,
        start: int,
        base_pages: int,
    ) -> None:
        self.length = length
        self.base_pages = base_pages
        self.page_size = page_size
        self.boundaries = boundaries
        self._rows = rows
        self._start = start

    @classmethod
    def from_records(
        cls,
        records: Int64Array,
        seed: bytes,
        page_size: int,
        *,
        base_pages: int = 0,
        base_hash: int = 0,
    ) -> HashChain:
        """Hash `records` int64 [L, W]. They are kept by reference and must not change.

        With `base_pages` the records below that boundary are not read: its hash is `base_hash`.
        """
        rows = np.ascontiguousarray(records)
        length = len(rows)
        start = xxh3_64_intdigest(seed)
        boundaries = np.empty(length // page_size, dtype=np.uint64)
        if base_pages:
            boundaries[:base_pages] = base_hash
            known = rows[base_pages * page_size :]
            hash_pages(known, page_size, base_hash, boundaries[base_pages:])
        else:
            hash_pages(rows, page_size, start, boundaries)
        return cls(
            length=length,
            page_size=page_size,
            boundaries=boundaries,
            rows=rows,
            start=start,
            base_pages=base_pages,
        )

    @property
    def base_len(self) -> int:
        """Records that are not known: those below the base of a delta request."""
        return self.base_pages * self.page_size

    @property
    def seed_hash(self) -> int:
        """The hash of the seed alone."""
        return self._start

    def at(self, length: int) -> int:
        """The hash of the first `length` records, base_len <= length <= L."""
        if not self.base_len <= length <= self.length:
            raise InvariantError(f"no fingerprint at {length} of a history of {self.length}")
        pages, rest = divmod(length, self.page_size)
        boundary = int(self.boundaries[pages - 1]) if pages else self._start
        if rest == 0:
            return boundary
        return xxh3_64_intdigest(self._rows[pages * self.page_size : length].data, boundary)

    def between(self, first_page: int, last_page: int) -> Uint64Array:
        """The hashes at the end of the pages [first_page, last_page), all above the base."""
        if first_page < self.base_pages:
            raise InvariantError(
                f"no fingerprint of page {first_page}: the history is known from page "
                f"{self.base_pages} on"
            )
        return self.boundaries[first_page:last_page]


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
    at `length`; read only when that lies inside a page. A state that does not have a delta
    request's base is no match, and nothing is said against it: it does not diverge. The last
    boundary in common stands for all before it; they are looked at only when it differs.
    """
    page_size, base_pages = chain.page_size, chain.base_pages
    common = min(len(hashes), len(chain.boundaries))
    first = 0
    if base_pages:
        first = base_pages - 1
        if common <= first or hashes[first] != chain.boundaries[first]:
            return NO_MATCH
    last = common - 1
    if last >= first and hashes[last] != chain.boundaries[last]:
        pages = first + int((hashes[first:common] != chain.boundaries[first:common]).argmax())
        return Match(matched=pages * page_size, is_prefix=False, diverges=True)
    if chain.length < length:
        return Match(matched=common * page_size, is_prefix=True, diverges=False)
    if length % page_size == 0 or chain.at(length) == tail_hash:
        return Match(matched=length, is_prefix=False, diverges=False)
    return Match(matched=common * page_size, is_prefix=False, diverges=True)
