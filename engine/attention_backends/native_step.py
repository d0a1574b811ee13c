"""A step as the native kernels read it.

Legend: T rows of a step, N suffix rows, C chain columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.attention_backends.base import AttentionBatch, BiasBatch, LayerBias
from engine.attention_backends.bias import bucket_edges, time_buckets

TILE = 64
"""Keys that the kernel handles at once; it may read that many bias weights beyond visible ones."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NativeBias:
    """What a `research` bias needs in a step, as the kernel reads it.

    Attributes:
        row_position: int64 [T].
        buckets: uint8 [T, keys], time bucket of every row and key; whole tiles of columns.
        chain_buckets: uint8 [N, C].
        chain_distance: int64 [N, C], the key's position less the row's.
    """

    row_position: torch.Tensor
    buckets: torch.Tensor
    chain_buckets: torch.Tensor
    chain_distance: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NativeStep:
    """A step as the kernels read it.

    Attributes:
        batch: The step.
        suffix_of_row: int32 [T], a row's place among the suffix rows, -1: none. Empty: no suffix.
        chains: int32 [N, C], rows of the step that a suffix row reads, -1: none.
        bias: For models with one.
    """

    batch: AttentionBatch
    suffix_of_row: torch.Tensor
    chains: torch.Tensor
    bias: NativeBias | None

    @classmethod
    def from_batch(cls, batch: AttentionBatch) -> NativeStep:
        num_rows = len(batch.kv_lo)
        suffix_of_row = torch.full((num_rows,), -1, dtype=torch.int32)
        suffix_of_row[batch.suffix_rows] = torch.arange(len(batch.suffix_rows), dtype=torch.int32)
        chains = torch.full(batch.suffix_chain.shape, -1, dtype=torch.int32)
        is_read = batch.suffix_chain >= 0
        chains[is_read] = batch.suffix_rows[batch.suffix_chain[is_read]].int()
        bias = None if batch.bias is None else _native_bias(batch, batch.bias)
        return cls(batch=batch, suffix_of_row=suffix_of_row, chains=chains, bias=bias)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of a step that does not depend on a bias, in the order of `hstu_layer`."""
        batch = self.batch
        return [
            batch.row_indptr,
            batch.kv_lo,
            batch.kv_hi,
            batch.block_table,
            self.suffix_of_row,
            self.chains,
            batch.append_rows,
            batch.slot_mapping,
        ]


def _native_bias(batch: AttentionBatch, bias: BiasBatch) -> NativeBias:
    num_keys = -(-bias.key_time.shape[1] // TILE) * TILE
    buckets = torch.empty(len(batch.kv_lo), num_keys, dtype=torch.uint8)
    torch.ops.engine.time_buckets(
        bias.row_next_time, bias.key_time, batch.row_indptr, _edges(), buckets
    )
    # A place without a key has any: it is not read.
    key = batch.suffix_chain.clamp_min(0)
    row_position = bias.row_position[batch.suffix_rows].unsqueeze(1)
    next_time = bias.row_next_time[batch.suffix_rows].unsqueeze(1)
    return NativeBias(
        row_position=bias.row_position,
        buckets=buckets,
        chain_buckets=time_buckets(next_time, bias.suffix_time[key]).to(torch.uint8),
        chain_distance=bias.suffix_position[key] - row_position,
    )


def _edges() -> torch.Tensor:
    return torch.tensor(bucket_edges(), dtype=torch.int64)


def padded_position(bias: LayerBias) -> torch.Tensor:
    """The position weights with a tile of zeros on both sides."""
    return functional.pad(bias.position, (TILE, TILE))
