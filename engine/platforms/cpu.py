"""The CPU platform: both tiers are RAM, the device is one thread.

Shapes: P pages (the null page included), S page_size, H key/value heads, A qk_dim, V v_dim,
L layers, C chunks. A page of one layer is its K block [S, H, A] followed by its V block [S, H, V],
contiguous, in the model's dtype; the same page ids are used in all layers, and the layout is the
same in both tiers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from engine.attention_backends.base import KvPages
from engine.platforms.executor import Completed, DeviceExecutor, Executor, InlineExecutor
from engine.platforms.memory import allocate, available_bytes, require_available
from engine.platforms.wake import Wake
from engine.types import Int32Array

if TYPE_CHECKING:
    from engine.models.base import ModelSpec

__all__ = [
    "Completed",
    "DeviceExecutor",
    "Executor",
    "HostArena",
    "InlineExecutor",
    "KvPools",
    "Wake",
    "available_bytes",
]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _Pages:
    """The pages of one layer in one tensor, and the views of it that others use."""

    def __init__(self, memory: torch.Tensor, num_pages: int, page_size: int, spec: ModelSpec):
        k_width = page_size * spec.num_kv_heads * spec.qk_dim
        self.raw = memory.view(num_pages, -1)
        self.values = self.raw.view(_DTYPES[spec.dtype])
        self.views = KvPages(
            k=self.values[:, :k_width].view(num_pages, page_size, spec.num_kv_heads, spec.qk_dim),
            v=self.values[:, k_width:].view(num_pages, page_size, spec.num_kv_heads, spec.v_dim),
        )


class KvPools:
    """The device pool: for each layer one tensor of `num_pages` pages and the null page.

    The null page (id `num_pages`) stands in block tables where nothing is; nobody writes to it.
    Fresh pages are zero, or NaN with `poison`. The scratch pool serves runs outside the cache: one
    layer's K/V at a time in `scratch_pages` pages, its own null page last; it is allocated when
    first used.

    Args:
        spec: The model whose K/V is kept.
        page_size: Token slots of a page.
        num_pages: Usable pages; ids are [0, num_pages).
        scratch_pages: Usable pages of the scratch pool.
        poison: Fill fresh pages, and those given to `poison_pages`, with NaN.

    Raises ConfigError when the memory cannot be had.
    """

    def __init__(
        self, spec: ModelSpec, page_size: int, num_pages: int, scratch_pages: int, poison: bool
    ) -> None:
        self.spec = spec
        self.page_size = page_size
        self.num_pages = num_pages
        self.null_page = num_pages
        self.num_layers = spec.num_layers
        self.scratch_pages = scratch_pages
        self.poison = poison
        self.page_bytes = page_size * spec.bytes_per_token_layer
        layer_bytes = (num_pages + 1) * self.page_bytes
        self.num_bytes = layer_bytes * spec.num_layers
        option = f"device_pages ({num_pages}) or page_size ({page_size})"
        require_available(self.num_bytes, what="device pool", option=option)
        self._layers = [
            self._allocate(num_pages + 1, "device pool", option) for _ in range(spec.num_layers)
        ]
        self._scratch: _Pages | None = None

    def layer(self, layer: int) -> KvPages:
        """K [P, S, H, A] and V [P, S, H, V] of a layer: views, not contiguous."""
        return self._layers[layer].views

    def scratch_layer(self) -> KvPages:
        """The scratch pool's views, P = scratch_pages + 1; every layer uses the same pages."""
        if self._scratch is None:
            self._scratch = self._allocate(
                self.scratch_pages + 1, "scratch pool", "max_uncut_tokens"
            )
        return self._scratch.views

    def raw(self, layer: int) -> torch.Tensor:
        """The same memory as bytes: uint8 [P, page_bytes]."""
        return self._layers[layer].raw

    def poison_pages(self, pages: Int32Array) -> None:
        """Fill the pages with NaN in all layers. Does nothing unless `poison` was asked for."""
        if not self.poison or len(pages) == 0:
            return
        index = torch.from_numpy(pages).long()
        for layer in self._layers:
            layer.values.index_fill_(0, index, math.nan)

    def _allocate(self, num_pages: int, what: str, option: str) -> _Pages:
        memory = allocate(num_pages * self.page_bytes, what=what, option=option)
        pages = _Pages(memory, num_pages, self.page_size, self.spec)
        if self.poison:
            pages.values.fill_(math.nan)
        return pages


class HostArena:
    """The lower tier: `chunks` uint8 [C, L, pages_per_chunk, page_bytes].

    A layer of a chunk is contiguous. Host slot s is page s % pages_per_chunk of chunk
    s // pages_per_chunk.

    Args:
        reserved_bytes: Memory already promised to others but not touched yet (the device pool's
            `num_bytes`); counted when checking what is available.

    Raises ConfigError when the memory cannot be had.
    """

    def __init__(
        self,
        *,
        num_chunks: int,
        num_layers: int,
        pages_per_chunk: int,
        page_bytes: int,
        reserved_bytes: int = 0,
    ) -> None:
        self.num_chunks = num_chunks
        self.num_layers = num_layers
        self.pages_per_chunk = pages_per_chunk
        self.page_bytes = page_bytes
        self.num_bytes = num_chunks * num_layers * pages_per_chunk * page_bytes
        option = f"host_bytes ({self.num_bytes})"
        require_available(
            self.num_bytes, what="host arena", option=option, reserved_bytes=reserved_bytes
        )
        self.chunks = allocate(self.num_bytes, what="host arena", option=option).view(
            num_chunks, num_layers, pages_per_chunk, page_bytes
        )

    @classmethod
    def within(cls, host_bytes: int, pools: KvPools, chunk_size: int) -> HostArena:
        """As many whole chunks of `chunk_size` tokens as `host_bytes` hold, for these pools."""
        pages_per_chunk = chunk_size // pools.page_size
        chunk_bytes = pools.num_layers * pages_per_chunk * pools.page_bytes
        return cls(
            num_chunks=host_bytes // chunk_bytes,
            num_layers=pools.num_layers,
            pages_per_chunk=pages_per_chunk,
            page_bytes=pools.page_bytes,
            reserved_bytes=pools.num_bytes,
        )
