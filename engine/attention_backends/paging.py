"""Writing rows to pages, and reading rows of pages as one indexed copy.

Legend: P pages, S page_size, H heads, K kv heads, A head dim, N rows.
"""

from __future__ import annotations

import torch

from engine.attention_backends.base import KvPages


def append_rows(pages: KvPages, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write k [N, K, A] and v [N, K, V] to slots (page * S + offset), int64 [N]."""
    if len(slots) == 0:
        return
    page_size = pages.k.shape[1]
    page = torch.div(slots, page_size, rounding_mode="floor")
    offset = slots - page * page_size
    for pages_PSKA, rows_NKA in ((pages.k, k), (pages.v, v)):
        flat = _token_rows(pages_PSKA)
        if flat is None:
            pages_PSKA[page, offset] = rows_NKA
            continue
        rows, tokens_per_page = flat
        rows.index_copy_(0, page * tokens_per_page + offset, rows_NKA.reshape(len(slots), -1))


class HeadRows:
    """The pages as rows of one head of one token, so that one index_select gathers them.

    `rows` [num_rows, A] is a view; `None` when the strides of the pages do not allow it.
    """

    def __init__(self, pages_PSKA: torch.Tensor) -> None:
        num_pages, page_size, num_kv_heads, width = pages_PSKA.shape
        page_stride = pages_PSKA.stride(0)
        dense = pages_PSKA.stride()[1:] == (num_kv_heads * width, width, 1)
        self.num_kv_heads = num_kv_heads
        self.rows_per_page = page_stride // width
        self.rows: torch.Tensor | None = None
        if dense and page_stride % width == 0:
            num_rows = (num_pages - 1) * self.rows_per_page + page_size * num_kv_heads
            self.rows = pages_PSKA.as_strided(
                (num_rows, width), (width, 1), pages_PSKA.storage_offset()
            )

    def index(
        self, page: torch.Tensor, offset: torch.Tensor, kv_head: torch.Tensor
    ) -> torch.Tensor:
        """Row index of each (page, offset, kv head); the three broadcast. int64."""
        return page * self.rows_per_page + offset * self.num_kv_heads + kv_head


def _token_rows(pages_PSKA: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """The pages as rows of one token [num_rows, K * A] and the rows of a page; None: no such view.

    A page may be followed by other bytes (its V block), as long as they are whole rows.
    """
    num_pages, page_size, num_kv_heads, width = pages_PSKA.shape
    row_width = num_kv_heads * width
    page_stride = pages_PSKA.stride(0)
    if pages_PSKA.stride()[1:] != (row_width, width, 1) or page_stride % row_width:
        return None
    tokens_per_page = page_stride // row_width
    num_rows = (num_pages - 1) * tokens_per_page + page_size
    rows = pages_PSKA.as_strided((num_rows, row_width), (row_width, 1), pages_PSKA.storage_offset())
    return rows, tokens_per_page
