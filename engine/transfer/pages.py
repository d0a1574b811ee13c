"""Pages of one layer <-> one layer of a chunk, on the calling thread.

Shapes: P pages, C pages of a chunk, B elements of a page, n pages to move. `pages` is [P, B] and
`chunk` [C, B], contiguous, on CPU, of one dtype; `page_ids` int32 [n]. Ids that do not exist, rows
that do not fit and other shapes raise RuntimeError before anything is written.
"""

from __future__ import annotations

import functools

import torch

from engine.native_library import load_library


def gather_pages(
    pages_PB: torch.Tensor, page_ids_n: torch.Tensor, chunk_CB: torch.Tensor, first: int
) -> None:
    """chunk[first + i] = pages[page_ids[i]]; only the chunk is written."""
    if _is_native():
        torch.ops.engine.gather_pages(pages_PB, page_ids_n, chunk_CB, first)
    else:
        gather_pages_reference(pages_PB, page_ids_n, chunk_CB, first)


def scatter_pages(
    chunk_CB: torch.Tensor, first: int, page_ids_n: torch.Tensor, pages_PB: torch.Tensor
) -> None:
    """pages[page_ids[i]] = chunk[first + i], in order of i; only those pages are written."""
    if _is_native():
        torch.ops.engine.scatter_pages(chunk_CB, first, page_ids_n, pages_PB)
    else:
        scatter_pages_reference(chunk_CB, first, page_ids_n, pages_PB)


def gather_pages_reference(
    pages_PB: torch.Tensor, page_ids_n: torch.Tensor, chunk_CB: torch.Tensor, first: int
) -> None:
    """The same as `gather_pages`, one page at a time."""
    check_rows(pages_PB, page_ids_n, chunk_CB, first)
    for row, page in enumerate(page_ids_n.tolist(), start=first):
        chunk_CB[row] = pages_PB[page]


def scatter_pages_reference(
    chunk_CB: torch.Tensor, first: int, page_ids_n: torch.Tensor, pages_PB: torch.Tensor
) -> None:
    """The same as `scatter_pages`, one page at a time."""
    check_rows(pages_PB, page_ids_n, chunk_CB, first)
    for row, page in enumerate(page_ids_n.tolist(), start=first):
        pages_PB[page] = chunk_CB[row]


def check_rows(
    pages_PB: torch.Tensor, page_ids_n: torch.Tensor, chunk_CB: torch.Tensor, first: int
) -> None:
    """Raise RuntimeError unless the arguments are as the file's first lines say."""
    check_shapes(pages_PB, page_ids_n, chunk_CB, first)
    for index, page in enumerate(page_ids_n.tolist()):
        if not 0 <= page < len(pages_PB):
            raise RuntimeError(f"page_ids[{index}] is {page}, but only [0, {len(pages_PB)}) exist")


def check_shapes(
    pages_PB: torch.Tensor, page_ids_n: torch.Tensor, chunk_CB: torch.Tensor, first: int
) -> None:
    """The part of `check_rows` that needs no values."""
    if page_ids_n.dtype != torch.int32 or page_ids_n.dim() != 1:
        raise RuntimeError(f"page_ids must be int32 [n], not {page_ids_n.dtype} {page_ids_n.shape}")
    for rows in (pages_PB, chunk_CB):
        if rows.dim() != 2 or not rows.is_contiguous():
            raise RuntimeError("pages and chunk must be two-dimensional, contiguous and on the CPU")
    if pages_PB.dtype != chunk_CB.dtype or pages_PB.shape[1] != chunk_CB.shape[1]:
        raise RuntimeError(
            "a page and a row of the chunk must have one dtype and width; widths are "
            f"{pages_PB.shape[1]} and {chunk_CB.shape[1]}"
        )
    if not (first >= 0 and first + len(page_ids_n) <= len(chunk_CB)):
        raise RuntimeError(
            f"{len(page_ids_n)} rows from {first} on do not fit in a chunk of {len(chunk_CB)}"
        )


@functools.cache
def _is_native() -> bool:
    if load_library() is not None:
        return False
    torch.library.register_fake("engine::gather_pages", check_shapes)
    torch.library.register_fake("engine::scatter_pages", _check_scatter_shapes)
    return True


def _check_scatter_shapes(
    chunk_CB: torch.Tensor, first: int, page_ids_n: torch.Tensor, pages_PB: torch.Tensor
) -> None:
    check_shapes(pages_PB, page_ids_n, chunk_CB, first)
