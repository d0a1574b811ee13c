"""One layer's attention over a ragged batch of random requests, as the engine's steps have it.

Each request has a history of which the last `new` rows are computed in the step, and candidates
that see the whole history and themselves. Pages are shuffled.

Legend: R requests, T rows of the step, H heads, D width of a head, P pages, S page size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from engine.attention_backends.base import AttentionBackend, AttentionBatch, AttentionSpec, KvPages
from engine.attention_backends.suffix import StepAttention
from engine.runner.batch import PieceRows, assemble

PAGE_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Sizes of a step: history lengths (new rows included), and rows that each request computes."""

    lengths: tuple[int, ...]
    new: int
    candidates: int
    num_heads: int
    width: int

    @property
    def rows(self) -> int:
        """Rows that each request computes."""
        return self.new + self.candidates

    @property
    def flops(self) -> int:
        """Of one layer, over the visible (row, key, head) pairs only: 4 * width each."""
        pairs = 0
        for length in self.lengths:
            first = length - self.new
            pairs += (length * (length + 1) - first * (first + 1)) // 2
            pairs += self.candidates * (length + 1)
        return 4 * self.width * self.num_heads * pairs

    @property
    def token_bytes(self) -> int:
        """Of K and V in bfloat16, all heads."""
        return 2 * 2 * self.num_heads * self.width


def ragged_lengths(mean: int, count: int, seed: int = 0) -> tuple[int, ...]:
    """History lengths spread evenly over [7/8, 9/8] of the mean, which they have; shuffled."""
    lengths = np.linspace(mean * 7 / 8, mean * 9 / 8, count).round().astype(int)
    return tuple(np.random.default_rng(seed).permutation(lengths).tolist())


class RaggedBatch:
    """The numbers of a step in one dtype, and its pages.

    Attributes:
        q, k, v: [T, H, D], rows of the step: [new history rows | candidates] of each request.
        history: Per request K and V of the rows before the new ones, [n, H, D] each.
    """

    def __init__(
        self,
        shape: BatchShape,
        dtype: torch.dtype,
        score: Literal["silu", "softmax"],
        seed: int = 0,
    ) -> None:
        self.shape = shape
        self.spec = AttentionSpec(
            platform="cpu",
            dtype=dtype,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_heads,
            qk_dim=shape.width,
            v_dim=shape.width,
            page_size=PAGE_SIZE,
            score=score,
            alpha=shape.width**-0.5,
            bias=None,
        )
        generator = torch.Generator().manual_seed(seed)

        def draw(count: int) -> torch.Tensor:
            values = torch.randn(count, shape.num_heads, shape.width, generator=generator)
            return values.to(dtype)

        num_rows = len(shape.lengths) * shape.rows
        self.q, self.k, self.v = draw(num_rows), draw(num_rows), draw(num_rows)
        self.history = [
            (draw(length - shape.new), draw(length - shape.new)) for length in shape.lengths
        ]
        self.tables, self.pages = self._fill_pages(seed)
        self.batch = self._assemble()

    def _fill_pages(self, seed: int) -> tuple[list[np.ndarray], KvPages]:
        """Block tables of shuffled pages, and pages that hold the rows before the new ones.

        A page is its K block followed by its V block, as in the engine's pools.
        """
        shape = self.shape
        counts = [-(-length // PAGE_SIZE) for length in shape.lengths]
        order = np.random.default_rng(seed).permutation(sum(counts)).astype(np.int32)
        tables = np.split(order, np.cumsum(counts)[:-1])
        block = PAGE_SIZE * shape.num_heads * shape.width
        memory = torch.zeros(sum(counts) + 1, 2 * block, dtype=self.spec.dtype)
        view = (len(memory), PAGE_SIZE, shape.num_heads, shape.width)
        pages = KvPages(memory[:, :block].view(view), memory[:, block:].view(view))
        for table, (k, v) in zip(tables, self.history, strict=True):
            position = np.arange(len(k))
            page = torch.from_numpy(table[position // PAGE_SIZE].astype(np.int64))
            offset = torch.from_numpy(position % PAGE_SIZE)
            pages.k[page, offset], pages.v[page, offset] = k, v
        return tables, pages

    def _assemble(self) -> AttentionBatch:
        shape = self.shape
        pieces = []
        for length, table in zip(shape.lengths, self.tables, strict=True):
            start = length - shape.new
            seen = np.append(np.arange(start, length) + 1, np.full(shape.candidates, length))
            pieces.append(
                PieceRows(
                    start=start,
                    stop=length,
                    suffix=np.arange(shape.candidates),
                    suffix_parent=np.full(shape.candidates, -1, np.int32),
                    suffix_reads_self=np.ones(shape.candidates, np.bool_),
                    kv_lo=np.zeros(shape.rows, np.int32),
                    kv_hi=seen.astype(np.int32),
                    block_table=table,
                )
            )
        return assemble(pieces, PAGE_SIZE, len(self.pages.k) - 1)


class LayerRun:
    """One layer of a step with a backend: `prepare` once, then append and attend."""

    def __init__(self, ragged: RaggedBatch, backend: AttentionBackend) -> None:
        self._ragged = ragged
        self._backend = backend
        self.prepare()

    def prepare(self) -> None:
        """Plan the step, as the runner does before its first layer."""
        self._attention = StepAttention(self._backend, self._ragged.batch)

    def layer(self) -> torch.Tensor:
        """Everything between a layer's projections and its output: float32 [T, H, D]."""
        ragged = self._ragged
        appended = ragged.batch.append_rows
        self._backend.append(
            ragged.pages, ragged.k.index_select(0, appended), ragged.v.index_select(0, appended)
        )
        return self._attention(ragged.pages, ragged.q, ragged.k, ragged.v, None)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of the expected values."""
    difference = (found.float() - expected.float()).square().mean()
    return float((difference / expected.float().square().mean()).sqrt())


def split_requests(rows: torch.Tensor, shape: BatchShape) -> torch.Tensor:
    """Rows of the step [T, ...] -> [R, rows, ...], a view."""
    return rows.view(len(shape.lengths), shape.rows, *rows.shape[1:])
