"""The `torch` backend: attention in fixed 64 x 64 tiles of batched matrix products.

What keeps it bitwise: every product has the same shape whatever the step (64 query rows, 64 keys
at absolute positions), and torch.bmm gives the same bits for a matrix whatever its neighbours, and
for a row wherever it stands in its tile (for widths that fill whole vectors: values are padded); a
row's tiles are added in ascending order in float32; what is hidden adds exact zeros (see
`tile_plan`). There is no loop over users: Python runs over groups, blocks and waves of tiles.

Legend: n active query tiles, B tiles of a block, H heads, M = 64 query rows, N = 64 keys, A qk_dim,
V v_dim, W v_dim padded, G key tiles of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from engine.attention_backends.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KvPages,
    LayerBias,
    Partial,
)
from engine.attention_backends.bias import bias_values, time_buckets
from engine.attention_backends.paging import HeadRows, append_rows
from engine.attention_backends.tile_plan import TILE, Block, Group, HiddenPairs, plan_step

_GROUP_BYTES = 32 << 20
_BUCKET_BYTES = 256 << 20
_MATRICES = 128
_GRAIN = 32768
_ALIGN = 64
_VALUE_STEP = 16


@dataclass(slots=True, eq=False)
class _Buckets:
    """Time buckets of the tiles of a step, uint8 per pair of row and key, kept across layers."""

    budget: int = _BUCKET_BYTES
    known: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


class TorchBackend(AttentionBackend):
    """Plain torch operations on the CPU; float32 or bfloat16, sums over tiles in float32.

    Owned by the device thread: its buffers are reused from layer to layer.

    Args:
        spec: Of the model.
        group_bytes: K and V gathered from the pages at once.
    """

    name = "torch"
    platforms = ("cpu",)
    dtypes = (torch.float32, torch.bfloat16)
    scores = ("silu", "softmax")
    biases = ("research",)
    is_bitwise = True

    _batch: AttentionBatch
    _groups: list[Group]
    _buckets: _Buckets

    def __init__(self, spec: AttentionSpec, *, group_bytes: int = _GROUP_BYTES) -> None:
        super().__init__(spec)
        heads, dtype = spec.num_heads, spec.dtype
        # For some narrow widths (5 to 7, 9 to 11 in float32), MKL's product of a row depends on the
        # row's place in the tile.
        self._v_width = v_width = -(-spec.v_dim // _VALUE_STEP) * _VALUE_STEP
        tile_bytes = heads * TILE * (spec.qk_dim + v_width) * dtype.itemsize
        self._max_group_tiles = max(1, group_bytes // tile_bytes)
        self._max_block_tiles = min(64, max(4, _MATRICES // heads))
        matrices = self._max_block_tiles * heads
        self._k = torch.empty(matrices, TILE, spec.qk_dim, dtype=dtype)
        self._v = torch.empty(matrices, TILE, v_width, dtype=dtype)
        self._product = torch.empty(matrices, TILE, v_width, dtype=dtype)
        self._scores = torch.zeros(matrices * TILE * TILE + (1 << 16), dtype=dtype)
        self._scores_wide = torch.zeros(
            len(self._scores) if spec.bias or spec.score == "softmax" else 0
        )
        group = heads // spec.num_kv_heads
        self._kv_head = (torch.arange(heads) // group).view(1, heads, 1)

    def row_difference(self) -> float:
        generator = torch.Generator().manual_seed(0)

        def tile(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(1, TILE, width, generator=generator).to(dtype)

        spec = self.spec
        q, k = tile(spec.qk_dim, spec.dtype), tile(spec.qk_dim, spec.dtype).transpose(1, 2)
        weights, v = tile(TILE, spec.dtype), self._pad(tile(spec.v_dim, spec.dtype))
        sums = tile(self._v_width, torch.float32)
        scores = torch.bmm(q, k)
        acc = sums.clone()
        self._accumulate(acc, weights, v)
        worst = 0.0
        for shift in range(1, TILE, 3):
            moved = sums.roll(shift, 1)
            self._accumulate(moved, weights.roll(shift, 1), v)
            for here, there in ((scores, torch.bmm(q.roll(shift, 1), k)), (acc, moved)):
                worst = max(worst, float((here.roll(shift, 1) - there).abs().max()))
        return worst

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._buckets = _Buckets()
        self._groups = plan_step(
            batch,
            self.spec.page_size,
            max_block_tiles=self._max_block_tiles,
            max_group_tiles=self._max_group_tiles,
        )

    def append(self, pages: KvPages, k: torch.Tensor, v: torch.Tensor) -> None:
        append_rows(pages, self._batch.slot_mapping, k, v)

    def attend(self, pages: KvPages, q: torch.Tensor, bias: LayerBias | None = None) -> Partial:
        num_rows, heads, v_dim = len(q), self.spec.num_heads, self.spec.v_dim
        out = torch.zeros(num_rows, heads, v_dim)
        lse = torch.full((num_rows, heads), -torch.inf) if self._is_softmax else None
        for group in self._groups:
            k_GHNA = self._gather(pages.k, group)
            v_GHNW = self._pad(self._gather(pages.v, group))
            for block in group.blocks:
                q_BHMA = self._query_tiles(q, block)
                if lse is None:
                    acc = self._silu_block(block, q_BHMA, k_GHNA, v_GHNW, bias)
                else:
                    acc, block_lse = self._softmax_block(block, q_BHMA, k_GHNA, v_GHNW, bias)
                    _scatter(block, block_lse, lse)
                _scatter(block, acc, out)
        return Partial(out, lse)

    @property
    def _is_softmax(self) -> bool:
        return self.spec.score == "softmax"

    def _gather(self, pages_PSKA: torch.Tensor, group: Group) -> torch.Tensor:
        """The group's key tiles [G, H, N, A], contiguous."""
        num_tiles, heads = len(group.page), self.spec.num_heads
        view = HeadRows(pages_PSKA)
        if view.rows is not None:
            index = view.index(group.page.unsqueeze(1), group.offset.unsqueeze(1), self._kv_head)
            return view.rows.index_select(0, index.view(-1)).view(num_tiles, heads, TILE, -1)
        rows_GNKA = pages_PSKA[group.page, group.offset]
        return rows_GNKA.index_select(2, self._kv_head.view(-1)).transpose(1, 2).contiguous()

    def _pad(self, v_GHNV: torch.Tensor) -> torch.Tensor:
        """Value tiles with columns of zeros up to the padded width [G, H, N, W]."""
        missing = self._v_width - v_GHNV.shape[-1]
        return functional.pad(v_GHNV, (0, missing)) if missing else v_GHNV

    def _query_tiles(self, q: torch.Tensor, block: Block) -> torch.Tensor:
        """The block's query rows [B * H, M, A]."""
        heads, width = self.spec.num_heads, self.spec.qk_dim
        rows = q.index_select(0, block.rows).view(block.num_tiles, TILE, heads, width)
        return rows.transpose(1, 2).reshape(block.num_tiles * heads, TILE, width)

    def _silu_block(
        self,
        block: Block,
        q: torch.Tensor,
        k_GHNA: torch.Tensor,
        v_GHNW: torch.Tensor,
        bias: LayerBias | None,
    ) -> torch.Tensor:
        """Sums of the block, float32 [B, H, M, V]."""
        heads, v_dim, v_width = self.spec.num_heads, self.spec.v_dim, self._v_width
        acc = torch.zeros(block.num_tiles * heads, TILE, v_width)
        for wave, active in enumerate(block.active):
            size = active * heads
            weights = self._wave_scores(block, wave, q, k_GHNA)
            if bias is None:
                _silu_(self._scores, weights.numel())
            else:
                wide = self._add_bias(weights, block, wave, bias)
                _silu_(self._scores_wide, wide.numel())
                weights.copy_(wide)
            _hide(weights.view(active, heads, TILE, TILE), block.partial[wave], 0.0)
            v = self._select(v_GHNW, block, wave, self._v)
            self._accumulate(acc[:size], weights, v)
        return acc.view(block.num_tiles, heads, TILE, v_width)[..., :v_dim]

    def _softmax_block(
        self,
        block: Block,
        q: torch.Tensor,
        k_GHNA: torch.Tensor,
        v_GHNW: torch.Tensor,
        bias: LayerBias | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised sums [B, H, M, V] and log-sum-exp [B, H, M], float32."""
        heads, v_dim, v_width = self.spec.num_heads, self.spec.v_dim, self._v_width
        acc = torch.zeros(block.num_tiles * heads, TILE, v_width)
        total = torch.zeros(block.num_tiles * heads, TILE)
        top = torch.full((block.num_tiles * heads, TILE), -torch.inf)
        for wave, active in enumerate(block.active):
            size = active * heads
            scores = self._wave_scores(block, wave, q, k_GHNA)
            wide = self._add_bias(scores, block, wave, bias)
            _hide(wide.view(active, heads, TILE, TILE), block.partial[wave], -torch.inf)
            new_top = torch.maximum(top[:size], wide.amax(-1))
            finite_top = torch.where(new_top == -torch.inf, 0.0, new_top)
            shrink = torch.exp(top[:size] - finite_top)
            top[:size] = new_top
            wide.sub_(finite_top.unsqueeze(2)).exp_()
            total[:size].mul_(shrink).add_(wide.sum(-1))
            acc[:size].mul_(shrink.unsqueeze(2))
            scores.copy_(wide)
            v = self._select(v_GHNW, block, wave, self._v)
            self._accumulate(acc[:size], scores, v)
        lse = torch.log(total) + top
        acc.div_(torch.where(total == 0, 1.0, total).unsqueeze(2))
        return (
            acc.view(block.num_tiles, heads, TILE, v_width)[..., :v_dim],
            lse.view(block.num_tiles, heads, TILE),
        )

    def _wave_scores(
        self, block: Block, wave: int, q: torch.Tensor, k_GHNA: torch.Tensor
    ) -> torch.Tensor:
        """alpha * q.k of a wave [n * H, M, N] in the model's dtype, in the score buffer."""
        k = self._select(k_GHNA, block, wave, self._k)
        size = len(k)
        scores = self._scores[: size * TILE * TILE].view(size, TILE, TILE)
        torch.baddbmm(
            scores, q[:size], k.transpose(1, 2), beta=0, alpha=self.spec.alpha, out=scores
        )
        return scores

    def _select(
        self, tiles: torch.Tensor, block: Block, wave: int, buffer: torch.Tensor
    ) -> torch.Tensor:
        """The key tiles of a wave's active query tiles [n * H, N, A or V]."""
        active, heads = block.active[wave], self.spec.num_heads
        chosen = buffer[: active * heads]
        torch.index_select(
            tiles, 0, block.key_tiles[wave, :active], out=chosen.view(active, *tiles.shape[1:])
        )
        return chosen

    def _accumulate(self, acc: torch.Tensor, weights: torch.Tensor, v: torch.Tensor) -> None:
        """acc += weights @ v, float32."""
        if acc.dtype == weights.dtype:
            torch.baddbmm(acc, weights, v, out=acc)
            return
        product = self._product[: len(v)]
        torch.bmm(weights, v, out=product)
        acc.add_(product)

    def _add_bias(
        self, scores: torch.Tensor, block: Block, wave: int, bias: LayerBias | None
    ) -> torch.Tensor:
        """Scores widened to float32 in the wide buffer, the bias added."""
        wide = self._scores_wide[: scores.numel()].view(scores.shape)
        wide.copy_(scores)
        if bias is not None:
            values = self._wave_bias(block, wave, bias)
            wide.view(len(values), -1, TILE, TILE).add_(values.unsqueeze(1))
        return wide

    def _wave_bias(self, block: Block, wave: int, tables: LayerBias) -> torch.Tensor:
        """Bias of a wave's active tiles, float32 [n, M, N]."""
        inputs = self._batch.bias
        assert inputs is not None, "a step of a model with a bias carries its inputs"
        active = block.active[wave]
        rows = block.rows[: active * TILE]
        row_position = inputs.row_position[rows].view(active, TILE, 1)
        first = block.first_position[wave, :active].view(active, 1, 1)
        key_position = first + torch.arange(TILE)
        buckets = self._buckets.known.get((id(block), wave))
        if buckets is None:
            place = key_position.clamp(max=inputs.key_time.shape[1] - 1)
            key_time = inputs.key_time[block.requests[:active].view(active, 1, 1), place]
            next_time = inputs.row_next_time[rows].view(active, TILE, 1)
            buckets = time_buckets(next_time, key_time).to(torch.uint8)
            if buckets.numel() <= self._buckets.budget:
                self._buckets.budget -= buckets.numel()
                self._buckets.known[id(block), wave] = buckets
        return bias_values(tables, row_position, key_position, buckets.int())


def _silu_(flat: torch.Tensor, count: int) -> None:
    """SiLU of the first `count` values, in place; some values behind them may change too.

    A vectorised loop treats the end of a thread's share in another way, an ulp apart. So the length
    is rounded up to where every share is a whole number of vectors.
    """
    length, rounded = 0, count
    while rounded != length:
        length = rounded
        shares = min(torch.get_num_threads(), -(-length // _GRAIN))
        rounded = -(-length // (_ALIGN * shares)) * _ALIGN * shares
    functional.silu(flat[:length], inplace=True)


def _hide(values: torch.Tensor, partial: HiddenPairs | None, fill: float) -> None:
    """Fill what is hidden in values [n, H, M, N]."""
    if partial is None:
        return
    if isinstance(partial.tiles, slice):
        values[partial.tiles].masked_fill_(partial.hidden, fill)
        return
    chosen = values.index_select(0, partial.tiles).masked_fill_(partial.hidden, fill)
    values.index_copy_(0, partial.tiles, chosen)


def _scatter(block: Block, tiles: torch.Tensor, out: torch.Tensor) -> None:
    """Write tiles [B, H, M, ...] to the rows of out [T, H, ...]."""
    rows = tiles.transpose(1, 2).reshape(block.num_tiles * TILE, *out.shape[1:])
    if len(block.out_places) != len(rows):
        rows = rows.index_select(0, block.out_places)
    out.index_copy_(0, block.out_rows, rows)
