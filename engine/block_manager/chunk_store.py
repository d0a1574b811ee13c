"""Host space: which chunks are free, and where a user's pages lie in its chunks.

A user's host prefix occupies whole chunks, in order; the last one perhaps in part.
"""

from __future__ import annotations

import numpy as np

from engine.block_manager.layout import Layout
from engine.block_manager.page_pool import RefPool
from engine.types import Int32Array


class ChunkStore:
    """The chunks of the host arena and where pages lie in them. Owned by the loop thread.

    Attributes:
        pool: References to chunks; owners are user states and copy jobs.
    """

    __slots__ = ("_pages_per_chunk", "pool")

    def __init__(self, num_chunks: int, layout: Layout) -> None:
        self.pool = RefPool(num_chunks, "chunk")
        self._pages_per_chunk = layout.pages_per_chunk

    def chunks_of(self, chunks: Int32Array, first_page: int, last_page: int) -> Int32Array:
        """Of a user's chunks, those that hold pages [first_page, last_page), a copy."""
        first = first_page // self._pages_per_chunk
        last = -(-last_page // self._pages_per_chunk)
        return chunks[first:last].copy()

    def slots_of(self, chunks: Int32Array, first_page: int, last_page: int) -> Int32Array:
        """Host slots of a user's pages [first_page, last_page): int32 [last_page - first_page].

        A slot is chunk id * pages_per_chunk + page within the chunk.
        """
        pages = np.arange(first_page, last_page, dtype=np.int32)
        chunk, within = np.divmod(pages, np.int32(self._pages_per_chunk))
        return chunks[chunk] * np.int32(self._pages_per_chunk) + within
