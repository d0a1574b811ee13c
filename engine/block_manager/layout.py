"""Arithmetic between tokens, pages, chunks and bytes. Pure numbers, no state.

Ranges are half-open. `page i` holds tokens `[i * page_size, (i + 1) * page_size)` of one user's
sequence; `chunk c` holds pages `[c * pages_per_chunk, (c + 1) * pages_per_chunk)`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True, kw_only=True)
class Layout:
    """Sizes of one engine.

    Attributes:
        page_size: Tokens of a page.
        pages_per_chunk: Pages of a chunk.
        page_bytes: Bytes of a page over all layers.
    """

    page_size: int
    pages_per_chunk: int
    page_bytes: int

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.page_size * self.pages_per_chunk

    def pages_for(self, tokens: int) -> int:
        """Pages that hold the first `tokens` tokens, the last one perhaps in part."""
        return -(-tokens // self.page_size)

    def full_pages(self, tokens: int) -> int:
        """Whole pages among the first `tokens` tokens."""
        return tokens // self.page_size

    def page_start(self, page: int) -> int:
        """First token of a page; also the tokens that `page` whole pages hold."""
        return page * self.page_size

    def floor(self, tokens: int) -> int:
        """The last page boundary at or below `tokens`."""
        return tokens - tokens % self.page_size

    def chunks_for(self, tokens: int) -> int:
        """Chunks that hold the first `tokens` tokens, the last one perhaps in part."""
        return -(-tokens // (self.page_size * self.pages_per_chunk))

    def bytes_of(self, num_pages: int) -> int:
        """Bytes of that many pages over all layers."""
        return num_pages * self.page_bytes
