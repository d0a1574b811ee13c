"""Token, page, chunk and slot arithmetic on literals."""

from __future__ import annotations

import numpy as np

from engine.block_manager.chunk_store import ChunkStore
from engine.block_manager.layout import Layout

LAYOUT = Layout(page_size=32, pages_per_chunk=4, page_bytes=1000)


def test_pages_and_chunks_round_up() -> None:
    assert [LAYOUT.pages_for(n) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]
    assert [LAYOUT.chunks_for(n) for n in (0, 1, 128, 129)] == [0, 1, 1, 2]
    assert LAYOUT.chunk_tokens == 128


def test_whole_pages_round_down() -> None:
    assert [LAYOUT.full_pages(n) for n in (0, 31, 32, 70)] == [0, 0, 1, 2]
    assert [LAYOUT.floor(n) for n in (0, 31, 32, 70)] == [0, 0, 32, 64]
    assert LAYOUT.page_start(3) == 96
    assert LAYOUT.bytes_of(7) == 7000


def test_host_slots_follow_the_users_chunks() -> None:
    store = ChunkStore(10, LAYOUT)
    chunks = np.array([7, 2, 5], dtype=np.int32)
    assert store.slots_of(chunks, 2, 6).tolist() == [30, 31, 8, 9]
    assert store.slots_of(chunks, 2, 6).dtype == np.int32
    assert store.chunks_of(chunks, 2, 6).tolist() == [7, 2]
    assert store.chunks_of(chunks, 4, 8).tolist() == [2]
    assert store.chunks_of(chunks, 8, 9).tolist() == [5]
