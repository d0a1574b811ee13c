"""One rig for both copy engines: small pools, an arena, and jobs between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.base import ModelSpec
from engine.native_library import load_library
from engine.platforms.cpu import HostArena, KvPools, Wake
from engine.testing.fakes import drain
from engine.transfer.jobs import CopyEngine, CopyJob, CopyProgress, Direction
from engine.transfer.native import NativeCopyEngine
from engine.transfer.python import PythonCopyEngine
from engine.types import Task

ENGINES = {"native": NativeCopyEngine, "python": PythonCopyEngine}


def make_spec(
    *, dtype: str = "float32", num_layers: int = 3, heads: int = 2, qk_dim: int = 4, v_dim: int = 6
) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        weights_version="1",
        dtype=dtype,
        num_layers=num_layers,
        hidden_size=8,
        num_heads=heads,
        num_kv_heads=heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        score="silu",
        alpha=1.0,
        scale=1.0,
        tokens_per_event=1,
        num_context=0,
        window=0,
        has_bidirectional_context=False,
        has_positions_from_newest=False,
        has_query_time_inputs=False,
        has_next_event_bias=False,
        bias=None,
        max_history_tokens=64,
        max_chain=1,
        tasks=(Task.RANK,),
        flops_per_token=1,
    )


@dataclass(slots=True, eq=False)
class Rig:
    """A copy engine with everything around it."""

    pools: KvPools
    arena: HostArena
    wake: Wake
    copies: CopyEngine

    def job(self, direction: Direction, pages: list[int], slots: list[int]) -> CopyJob:
        return CopyJob(
            direction=direction,
            first_page=0,
            pages=np.array(pages, dtype=np.int32),
            host_slots=np.array(slots, dtype=np.int32),
            owner=None,
            branch=0,
        )

    def onload(self, pages: list[int], slots: list[int]) -> CopyJob:
        job = self.job(Direction.ONLOAD, pages, slots)
        self.copies.submit(job)
        return job

    def offload(self, pages: list[int], slots: list[int]) -> CopyJob:
        job = self.job(Direction.OFFLOAD, pages, slots)
        self.copies.submit(job)
        return job

    def drain(self, *jobs: CopyJob) -> list[CopyProgress]:
        return drain(self.copies, jobs)

    def randomize(self) -> None:
        """Random bytes everywhere, in both tiers."""
        for layer in range(self.pools.num_layers):
            self.pools.raw(layer).random_(0, 256)
        self.arena.chunks.random_(0, 256)

    def device_page(self, layer: int, page: int) -> torch.Tensor:
        return self.pools.raw(layer)[page]

    def host_page(self, layer: int, slot: int) -> torch.Tensor:
        size = self.arena.pages_per_chunk
        return self.arena.chunks[slot // size, layer, slot % size]


def build_rig(
    engine_type: type[NativeCopyEngine] | type[PythonCopyEngine],
    *,
    dtype: str = "float32",
    num_layers: int = 3,
    page_size: int = 2,
    num_pages: int = 12,
    num_chunks: int = 4,
    pages_per_chunk: int = 3,
    qk_dim: int = 4,
    v_dim: int = 6,
) -> Rig:
    spec = make_spec(dtype=dtype, num_layers=num_layers, qk_dim=qk_dim, v_dim=v_dim)
    pools = KvPools(spec, page_size, num_pages, scratch_pages=1, poison=False)
    arena = HostArena(
        num_chunks=num_chunks,
        num_layers=num_layers,
        pages_per_chunk=pages_per_chunk,
        page_bytes=pools.page_bytes,
    )
    if engine_type is NativeCopyEngine and (reason := load_library()) is not None:
        pytest.skip(f"no native library: {reason}")
    wake = Wake()
    return Rig(pools, arena, wake, engine_type(pools, arena, wake))


@pytest.fixture(params=sorted(ENGINES))
def make_rig(request: pytest.FixtureRequest) -> Iterator[Callable[..., Rig]]:
    """A function that builds a rig for one copy engine; each test runs with both engines."""
    rigs: list[Rig] = []

    def build(**sizes: Any) -> Rig:
        rigs.append(build_rig(ENGINES[request.param], **sizes))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.copies.close()
        rig.wake.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@pytest.fixture
def native_rig() -> Iterator[Rig]:
    rig = build_rig(NativeCopyEngine)
    yield rig
    rig.copies.close()
    rig.wake.close()
