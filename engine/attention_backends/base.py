"""What an attention backend is: class-level facts, `validate`, and three calls.

Per step `prepare(batch)`; per layer `append(...)`, then `attend(...)`. A backend has to know only
the part over history pages: two int32 a row. The suffix part and the combination are shared code
(`suffix.py`), unless the backend fuses them.

Shapes: T query rows of a step, R requests, H heads, A qk_dim, V v_dim, P pages (the null page
included), S page_size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What a model and a configuration ask of a backend."""

    platform: Literal["cpu", "cuda"]
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    page_size: int
    score: Literal["silu", "softmax"]
    alpha: float
    bias: Literal["research"] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BiasBatch:
    """What a `research` bias needs in a step.

    Attributes:
        row_position: int64 [T], absolute position of each query row.
        row_next_time: int64 [T].
        key_time: int64 [R, max_kv_len], time of each history row; 0 past a request's length.
        suffix_time: int64 [num_suffix], time of each suffix row.
        suffix_position: int64 [num_suffix].
    """

    row_position: torch.Tensor
    row_next_time: torch.Tensor
    key_time: torch.Tensor
    suffix_time: torch.Tensor
    suffix_position: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBatch:
    """One step's rows, the same for every layer. All integer tensors are contiguous, on CPU.

    Rows are grouped by request: request r owns rows [row_indptr[r], row_indptr[r + 1]).

    Attributes:
        row_indptr: int32 [R + 1].
        kv_lo, kv_hi: int32 [T]; row t sees history positions [kv_lo, kv_hi); lo >= hi: none.
        block_table: int32 [R, max_blocks]; page of position p is block_table[r, p // page_size];
            past the end: the null page (id num_pages).
        append_rows: int64 [num_append], rows whose K/V are written to the pages.
        slot_mapping: int64 [num_append], slot (page * page_size + offset) of each.
        suffix_rows: int64 [num_suffix], rows with a suffix part.
        suffix_chain: int64 [num_suffix, max_chain]: indices *into suffix_rows* of the rows read,
            the row itself last, ancestors in root-first order, -1 on the left for none. A row
            that does not read itself has only -1.
        bias: For models with one.
    """

    row_indptr: torch.Tensor
    kv_lo: torch.Tensor
    kv_hi: torch.Tensor
    block_table: torch.Tensor
    append_rows: torch.Tensor
    slot_mapping: torch.Tensor
    suffix_rows: torch.Tensor
    suffix_chain: torch.Tensor
    bias: BiasBatch | None = None


class KvPages(NamedTuple):
    """Views of one layer's pages. k: [P, S, H, A], v: [P, S, H, V]; strided, not contiguous."""

    k: torch.Tensor
    v: torch.Tensor


class LayerBias(NamedTuple):
    """One layer's bias tables: position [2n - 1], time [buckets + 1], float32."""

    position: torch.Tensor
    time: torch.Tensor


class Partial(NamedTuple):
    """Attention over part of the keys.

    out: float32 [T, H, V]; for silu the plain sum (the model's 1/N is not applied), for softmax
    normalised over these keys. lse: float32 [T, H], natural log, -inf for a row without visible
    keys; None for silu.
    """

    out: torch.Tensor
    lse: torch.Tensor | None


class AttentionBackend(ABC):
    """Attention of query rows over history pages. One instance serves one model.

    Class attributes say what it can do; `validate` turns them into reasons.
    """

    name: ClassVar[str]
    platforms: ClassVar[tuple[str, ...]]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    scores: ClassVar[tuple[str, ...]]
    biases: ClassVar[tuple[str, ...]] = ()
    is_bitwise: ClassVar[bool]
    """A row's bits do not depend on batch-mates, pieces, page size, block order or threads."""

    fuses_suffix: ClassVar[bool] = False
    """Whether it has `attend_with_suffix`, which then takes the place of `attend` in a step."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @classmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        """All reasons why this backend cannot serve the spec; empty when it can."""
        reasons = []
        if spec.platform not in cls.platforms:
            reasons.append(f"runs on {', '.join(cls.platforms)}, not on {spec.platform}")
        if spec.dtype not in cls.dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in cls.dtypes)
            reasons.append(f"serves {known}, not {str(spec.dtype).removeprefix('torch.')}")
        if spec.score not in cls.scores:
            reasons.append(f"computes {', '.join(cls.scores)}, not {spec.score}")
        if spec.bias is not None and spec.bias not in cls.biases:
            reasons.append(f"has no {spec.bias} bias")
        return reasons

    def row_difference(self) -> float:
        """How much a row differs between places in a step, as tried at start on this machine; 0.0
        when the bits are the same. Only asked of bitwise backends."""
        return 0.0

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> None:
        """Plan a step. Called once, before the first layer."""

    def append(self, pages: KvPages, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write new K [num_append, H, A] and V [num_append, H, V] to their slots."""
        raise NotImplementedError

    @abstractmethod
    def attend(self, pages: KvPages, q: torch.Tensor, bias: LayerBias | None = None) -> Partial:
        """q [T, H, A] -> attention over each row's interval. Writes no page."""

    def attend_with_suffix(
        self,
        pages: KvPages,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: LayerBias | None = None,
    ) -> torch.Tensor:
        """The step's q [T, H, A], k [T, K, A], v [T, K, V] -> attention over each row's interval
        and its suffix chain, float32 [T, H, V], before the model's constant scale."""
        raise NotImplementedError(f"attention backend {self.name!r} does not fuse the suffix")
