"""The `cpu` backend: the native kernels for SiLU and softmax attention, suffix chains fused in.

What fixes a row's bits stands in `csrc/cpu/attention_kernel.h`. The instruction set is chosen at
run time (base, AVX2, or AVX-512 with BF16); the environment variable ENGINE_CPU_ISA forces one.
Bits differ between instruction sets, never within one.

Legend: T rows of a step, N suffix rows, C chain columns, H heads, K kv heads, A qk_dim, V v_dim.
"""

from __future__ import annotations

import torch

from engine.attention_backends.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KvPages,
    LayerBias,
    Partial,
)
from engine.attention_backends.native_step import NativeStep, padded_position
from engine.native_library import load_library


class CpuBackend(AttentionBackend):
    """Native kernels on the CPU; float32 or bfloat16 K/V, sums in float32.

    Owned by the device thread.
    """

    name = "cpu"
    platforms = ("cpu",)
    dtypes = (torch.float32, torch.bfloat16)
    scores = ("silu", "softmax")
    biases = ("research",)
    is_bitwise = True
    fuses_suffix = True

    _step: NativeStep

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._no_suffix = torch.empty(0, dtype=torch.int32)

    @classmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        missing = load_library()
        return [*([] if missing is None else [missing]), *super().validate(spec)]

    def prepare(self, batch: AttentionBatch) -> None:
        self._step = NativeStep.from_batch(batch)

    def append(self, pages: KvPages, k: torch.Tensor, v: torch.Tensor) -> None:
        torch.ops.engine.append_kv(k, v, self._step.batch.slot_mapping, pages.k, pages.v)

    def attend(self, pages: KvPages, q: torch.Tensor, bias: LayerBias | None = None) -> Partial:
        num_rows, spec = len(q), self.spec
        no_rows = q.new_empty((num_rows, spec.num_kv_heads, max(spec.qk_dim, spec.v_dim)))
        k, v = no_rows[..., : spec.qk_dim], no_rows[..., : spec.v_dim]
        lse = None if spec.score == "silu" else torch.empty(num_rows, spec.num_heads)
        out = self._run(pages, q, k.contiguous(), v.contiguous(), bias, self._no_suffix, lse)
        return Partial(out, lse)

    def attend_with_suffix(
        self,
        pages: KvPages,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: LayerBias | None = None,
    ) -> torch.Tensor:
        return self._run(pages, q, k, v, bias, self._step.suffix_of_row, None)

    def _run(
        self,
        pages: KvPages,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: LayerBias | None,
        suffix_of_row: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        step, spec = self._step, self.spec
        batch, of_step = step.batch, step.bias if bias is not None else None
        out = torch.empty(len(q), spec.num_heads, spec.v_dim)
        torch.ops.engine.attention(
            q,
            k,
            v,
            pages.k,
            pages.v,
            batch.row_indptr,
            batch.kv_lo,
            batch.kv_hi,
            batch.block_table,
            suffix_of_row,
            step.chains,
            None if bias is None else padded_position(bias),
            None if bias is None else bias.time,
            None if of_step is None else of_step.row_position,
            None if of_step is None else of_step.buckets,
            None if of_step is None else of_step.chain_buckets,
            None if of_step is None else of_step.chain_distance,
            spec.alpha,
            1.0,
            spec.score == "softmax",
            out,
            lse,
        )
        return out
