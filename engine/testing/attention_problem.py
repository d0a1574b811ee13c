"""The random requests of the attention conformance suite, and how a backend runs them.

Legend: L history rows of a request, S suffix rows, H heads, K kv heads, A qk_dim, V v_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention_backends.base import (
    AttentionBackend,
    AttentionSpec,
    KvPages,
    LayerBias,
)
from engine.attention_backends.suffix import StepAttention
from engine.runner.batch import PieceBias, PieceRows, assemble
from engine.types import Int32Array, Int64Array

Mask = Literal["causal", "full", "window", "prefix", "empty", "random", "context"]
Chain = Literal["self", "groups", "levels", "provisional", "rerun"]

_WINDOW = 29
_CONTEXT = 3
_BIAS_LENGTH = 300
_GROUP = 4


class RequestShape(NamedTuple):
    """One request of a case: `length` history rows of which the last `new` are computed.

    mask: what history rows see. chain: what suffix rows see in the suffix: themselves; earlier
    rows of their group of 4; a random earlier row and its ancestors; row 0 and themselves; or
    ("rerun") nothing, as a history row that is run again.
    """

    length: int
    new: int
    mask: str
    suffix: int
    chain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """Sizes and requests of one problem; the numbers follow from the seed."""

    score: Literal["silu", "softmax"] | str
    dtype: Literal["float32", "bfloat16"] | str
    requests: tuple[RequestShape, ...]
    seed: int
    num_heads: int = 2
    num_kv_heads: int = 2
    qk_dim: int = 32
    v_dim: int = 32
    page_size: int = 16
    bias: Literal["research"] | None = None

    def __str__(self) -> str:
        heads = f"{self.num_heads}x{self.qk_dim}x{self.v_dim}"
        if self.num_kv_heads != self.num_heads:
            heads += f"-kv{self.num_kv_heads}"
        chains = "+".join(dict.fromkeys(request.chain for request in self.requests))
        bias = f"-{self.bias}" if self.bias else ""
        return f"{self.score}-{self.dtype}-{heads}-page{self.page_size}-{chains}{bias}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    @property
    def spec(self) -> AttentionSpec:
        """What the case asks of a backend."""
        assert self.score in ("silu", "softmax")
        return AttentionSpec(
            platform="cpu",
            dtype=self.torch_dtype,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            qk_dim=self.qk_dim,
            v_dim=self.v_dim,
            page_size=self.page_size,
            score="silu" if self.score == "silu" else "softmax",
            alpha=self.qk_dim**-0.5,
            bias=self.bias,
        )


class Piece(NamedTuple):
    """Part of a request that runs in one step: history rows [start, stop), then suffix rows."""

    request: int
    start: int
    stop: int
    suffix: Int64Array


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRows:
    """The numbers of one request. Rows are [L history | S suffix].

    Attributes:
        q [L + S, H, A], k [L + S, K, A], v [L + S, K, V]: in the case's dtype.
        lo, hi: int32 [L + S], history interval of each row.
        parent, reads_self: int32, bool [S].
        position, time, next_time: int64 [L + S].
        first_row: Of this request among the computed rows of the problem.
    """

    shape: RequestShape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lo: Int32Array
    hi: Int32Array
    parent: Int32Array
    reads_self: NDArray[np.bool_]
    position: Int64Array
    time: Int64Array
    next_time: Int64Array
    first_row: int = 0


class Problem:
    """All requests of a case. Computed rows are numbered [new history rows | suffix rows] each."""

    def __init__(self, case: AttentionCase) -> None:
        self.case = case
        rng = np.random.default_rng(case.seed)
        self.requests = [_request(case, shape, rng) for shape in case.requests]
        self.num_rows = 0
        for rows in self.requests:
            rows.first_row = self.num_rows
            self.num_rows += rows.shape.new + rows.shape.suffix
        self.bias: LayerBias | None = None
        if case.bias is not None:
            self.bias = LayerBias(
                torch.from_numpy(rng.normal(size=2 * _BIAS_LENGTH - 1).astype(np.float32)),
                torch.from_numpy(rng.normal(size=129).astype(np.float32)),
            )

    def cut(self, size: int) -> list[list[Piece]]:
        """Steps of pieces of `size` rows; suffix rows in whole chains, where a mask allows it."""
        pieces = [self._cut(request, size) for request in range(len(self.requests))]
        num_steps = max(len(parts) for parts in pieces)
        return [[parts[step] for parts in pieces if step < len(parts)] for step in range(num_steps)]

    def _cut(self, request: int, size: int) -> list[Piece]:
        rows = self.requests[request]
        shape = rows.shape
        start, pieces = shape.length - shape.new, []
        if (rows.hi[start : shape.length] <= np.arange(start, shape.length) + 1).all():
            while start + size < shape.length:
                pieces.append(Piece(request, start, start + size, np.zeros(0, np.int64)))
                start += size
        parts = _chain_parts(rows.parent, size)
        pieces.append(Piece(request, start, shape.length, parts[0]))
        pieces += [Piece(request, shape.length, shape.length, part) for part in parts[1:]]
        return pieces


def whole_pieces(problem: Problem) -> list[list[Piece]]:
    """One step with every request in one piece."""
    return [
        [
            Piece(number, rows.shape.length - rows.shape.new, rows.shape.length,
                  np.arange(rows.shape.suffix))
            for number, rows in enumerate(problem.requests)
        ]
    ]  # fmt: skip


def run_step(
    make: Callable[[AttentionSpec], AttentionBackend],
    problem: Problem,
    steps: Sequence[Sequence[Piece]],
    *,
    page_size: int | None,
    shuffle: int,
) -> torch.Tensor:
    """Run the steps over fresh pages; float32 [rows of the problem, H, V].

    Rows before the computed ones are in the pages from the start; all other slots are NaN. Raises
    AssertionError when the backend changed a slot it was not told to write.
    """
    spec = problem.case.spec
    if page_size is not None:
        spec = replace(spec, page_size=page_size)
    store = _Store(problem, spec, shuffle)
    backend = make(spec)
    out = torch.full((problem.num_rows, spec.num_heads, spec.v_dim), torch.nan)
    for pieces in steps:
        batch = assemble(
            [_piece_rows(problem, piece, store.tables[piece.request]) for piece in pieces],
            spec.page_size,
            store.null_page,
        )
        rows = [_row_numbers(problem.requests[piece.request], piece) for piece in pieces]
        q, k, v = (
            torch.cat(
                [
                    getattr(problem.requests[piece.request], name)[torch.from_numpy(numbers)]
                    for piece, numbers in zip(pieces, rows, strict=True)
                ]
            )
            for name in ("q", "k", "v")
        )
        attention = StepAttention(backend, batch)
        before = store.snapshot()
        backend.append(store.pages, k[batch.append_rows], v[batch.append_rows])
        store.expect(before, batch.slot_mapping, k[batch.append_rows], v[batch.append_rows])
        before = store.snapshot()
        values = attention(store.pages, q, k, v, problem.bias)
        store.expect(before, batch.slot_mapping[:0], k[:0], v[:0])
        indptr = batch.row_indptr.tolist()
        for piece, numbers, start in zip(pieces, rows, indptr, strict=False):
            request = problem.requests[piece.request]
            target = request.first_row + numbers - (request.shape.length - request.shape.new)
            out[torch.from_numpy(target)] = values[start : start + len(numbers)]
    return out


class _Store:
    """Pages with shuffled block tables; slots that hold no row are NaN."""

    def __init__(self, problem: Problem, spec: AttentionSpec, shuffle: int) -> None:
        size = spec.page_size
        counts = [-(-rows.shape.length // size) for rows in problem.requests]
        self.null_page = sum(counts) + 2
        order = np.random.default_rng(shuffle).permutation(self.null_page).astype(np.int32)
        ends = np.cumsum([0, *counts])
        self.tables = [order[start:stop] for start, stop in pairwise(ends)]
        k_width = size * spec.num_kv_heads * spec.qk_dim
        width = k_width + size * spec.num_kv_heads * spec.v_dim
        self._memory = torch.full((self.null_page + 1, width), torch.nan, dtype=spec.dtype)
        shape = (self.null_page + 1, size, spec.num_kv_heads)
        self.pages = KvPages(
            self._memory[:, :k_width].view(*shape, spec.qk_dim),
            self._memory[:, k_width:].view(*shape, spec.v_dim),
        )
        for rows, table in zip(problem.requests, self.tables, strict=True):
            position = np.arange(rows.shape.length - rows.shape.new)
            page = torch.from_numpy(table[position // size].astype(np.int64))
            offset = torch.from_numpy(position % size)
            self.pages.k[page, offset] = rows.k[: len(position)]
            self.pages.v[page, offset] = rows.v[: len(position)]

    def snapshot(self) -> torch.Tensor:
        return self._memory.clone()

    def expect(
        self, before: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """The memory is `before` with k, v at the slots."""
        size = self.pages.k.shape[1]
        after = self._memory.clone()
        self._memory.copy_(before)
        self.pages.k[slots // size, slots % size] = k
        self.pages.v[slots // size, slots % size] = v
        assert torch.equal(self._memory.nan_to_num(nan=1e30), after.nan_to_num(nan=1e30)), (
            "the backend wrote to other slots than its slot mapping says, or other values"
        )


def _piece_rows(problem: Problem, piece: Piece, table: Int32Array) -> PieceRows:
    rows = problem.requests[piece.request]
    numbers = _row_numbers(rows, piece)
    suffix = rows.shape.length + piece.suffix
    bias = PieceBias(
        row_position=rows.position[numbers],
        row_next_time=rows.next_time[numbers],
        key_time=rows.time[: piece.stop],
        suffix_time=rows.time[suffix],
        suffix_position=rows.position[suffix],
    )
    return PieceRows(
        start=piece.start,
        stop=piece.stop,
        suffix=piece.suffix,
        suffix_parent=rows.parent,
        suffix_reads_self=rows.reads_self,
        kv_lo=rows.lo[numbers],
        kv_hi=rows.hi[numbers],
        block_table=table,
        bias=bias if problem.bias is not None else None,
    )


def _row_numbers(rows: RequestRows, piece: Piece) -> Int64Array:
    return np.concatenate((np.arange(piece.start, piece.stop), rows.shape.length + piece.suffix))


def _request(case: AttentionCase, shape: RequestShape, rng: np.random.Generator) -> RequestRows:
    length, suffix = shape.length, shape.suffix
    count = length + suffix

    def draw(heads: int, width: int) -> torch.Tensor:
        values = rng.normal(size=(count, heads, width)).astype(np.float32)
        return torch.from_numpy(values).to(case.torch_dtype)

    lo, hi = _intervals(shape, rng)
    time = np.cumsum(rng.integers(0, 5000, size=count)).astype(np.int64)
    position = np.arange(count)
    if shape.chain != "levels":
        position[length:] = length
    return RequestRows(
        shape=shape,
        q=draw(case.num_heads, case.qk_dim),
        k=draw(case.num_kv_heads, case.qk_dim),
        v=draw(case.num_kv_heads, case.v_dim),
        lo=lo,
        hi=hi,
        parent=_parents(shape, rng),
        reads_self=np.full(suffix, shape.chain != "rerun"),
        position=position,
        time=time,
        next_time=np.append(time[1:], time[-1:] + 977),
    )


def _intervals(shape: RequestShape, rng: np.random.Generator) -> tuple[Int32Array, Int32Array]:
    length, count = shape.length, shape.length + shape.suffix
    hi = np.minimum(np.arange(count) + 1, length)
    lo = np.zeros(count, np.int64)
    if shape.mask == "full":
        hi[:] = length
    elif shape.mask == "window":
        lo = np.maximum(np.minimum(np.arange(count), length) - _WINDOW, 0)
    elif shape.mask == "prefix":
        hi = np.minimum(hi, length - 40)
    elif shape.mask == "empty":
        lo = hi.copy()
    elif shape.mask == "random":
        lo = rng.integers(0, length, size=count)
        hi = np.minimum(lo + rng.integers(-5, length, size=count), length)
    elif shape.mask == "context":
        hi[:_CONTEXT] = length
    return lo.astype(np.int32), hi.astype(np.int32)


def _parents(shape: RequestShape, rng: np.random.Generator) -> Int32Array:
    index = np.arange(shape.suffix)
    if shape.chain == "groups":
        parent = np.where(index % _GROUP > 0, index - 1, -1)
    elif shape.chain == "levels":
        parent = np.array([rng.integers(-1, row) if row else -1 for row in index], np.int64)
    elif shape.chain == "provisional":
        parent = np.where(index > 0, 0, -1)
    else:
        parent = np.full(shape.suffix, -1)
    return parent.astype(np.int32)


def _chain_parts(parent: Int32Array, size: int) -> list[Int64Array]:
    """Suffix rows cut into parts of at least `size` leaves' chains; ancestors are repeated."""
    if not len(parent):
        return [np.zeros(0, np.int64)]
    parts = []
    for start in range(0, len(parent), size):
        wanted: set[int] = set()
        for row in range(start, min(start + size, len(parent))):
            current = row
            while current >= 0:
                wanted.add(current)
                current = int(parent[current])
        parts.append(np.array(sorted(wanted), np.int64))
    return parts
