"""Device pools and the host arena: layout, poison, limits."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.errors import ConfigError
from engine.platforms import memory
from engine.platforms.cpu import HostArena, KvPools

# H 2, A 3, V 5, float32: a token of one layer has 2 * (3 + 5) * 4 = 64 bytes.
SPEC = SimpleNamespace(
    dtype="float32", num_layers=2, num_kv_heads=2, qk_dim=3, v_dim=5, bytes_per_token_layer=64
)


@pytest.fixture
def pools():
    return KvPools(SPEC, page_size=4, num_pages=6, scratch_pages=3, poison=False)


def test_sizes_count_one_null_page_on_top(pools):
    assert pools.page_bytes == 256
    assert pools.null_page == 6
    assert pools.num_bytes == 2 * 7 * 256
    assert pools.raw(1).shape == (7, 256)
    assert pools.layer(0).k.shape == (7, 4, 2, 3)
    assert pools.layer(0).v.shape == (7, 4, 2, 5)


def test_a_page_is_its_k_block_followed_by_its_v_block(pools):
    pools.layer(1).k[2] = torch.arange(24, dtype=torch.float32).reshape(4, 2, 3)
    pools.layer(1).v[2] = torch.arange(100, 140, dtype=torch.float32).reshape(4, 2, 5)
    page = pools.raw(1)[2].view(torch.float32).tolist()
    assert page == [*range(24), *range(100, 140)]


def test_layers_and_pages_share_no_byte(pools):
    pools.layer(0).k[3] = 1.0
    assert pools.raw(0)[[0, 1, 2, 4, 5, 6]].count_nonzero() == 0
    assert pools.raw(1).count_nonzero() == 0


def test_fresh_pages_are_zero(pools):
    assert pools.raw(0).count_nonzero() == 0
    assert pools.scratch_layer().k.count_nonzero() == 0


def test_scratch_pages_are_one_pool_for_all_layers(pools):
    assert pools.scratch_layer().k.shape == (4, 4, 2, 3)
    assert pools.scratch_layer().v.data_ptr() == pools.scratch_layer().v.data_ptr()


def test_bfloat16_pages_have_half_the_bytes():
    spec = SimpleNamespace(**{**vars(SPEC), "dtype": "bfloat16", "bytes_per_token_layer": 32})
    pools = KvPools(spec, page_size=4, num_pages=6, scratch_pages=1, poison=False)
    assert pools.layer(0).v.dtype == torch.bfloat16
    assert pools.raw(0).shape == (7, 128)


def test_poison_fills_fresh_pages_and_the_pages_named_in_all_layers():
    pools = KvPools(SPEC, page_size=4, num_pages=6, scratch_pages=3, poison=True)
    assert all(torch.isnan(pools.layer(layer).k).all() for layer in range(2))
    assert torch.isnan(pools.scratch_layer().v).all()
    for layer in range(2):
        pools.raw(layer).zero_()
    pools.poison_pages(np.array([1, 4], dtype=np.int32))
    for layer in range(2):
        k, v = pools.layer(layer)
        assert torch.isnan(k[[1, 4]]).all()
        assert torch.isnan(v[[1, 4]]).all()
        assert k[[0, 2, 3, 5, 6]].count_nonzero() == 0


def test_poison_pages_does_nothing_without_poison(pools):
    pools.poison_pages(np.array([1], dtype=np.int32))
    assert not any(math.isnan(value) for value in pools.layer(0).k[1].flatten().tolist())


def test_the_arena_keeps_a_layer_of_a_chunk_together(pools):
    arena = HostArena.within(10_000, pools, chunk_size=8)
    assert (arena.num_chunks, arena.pages_per_chunk) == (9, 2)  # a chunk: 2 * 2 * 256 bytes
    assert arena.chunks.shape == (9, 2, 2, 256)
    assert arena.chunks.is_contiguous()
    assert arena.num_bytes == 9 * 1024
    assert arena.chunks.count_nonzero() == 0


def test_an_arena_without_room_for_a_chunk_is_empty(pools):
    arena = HostArena.within(1000, pools, chunk_size=8)
    assert arena.num_chunks == 0
    assert arena.chunks.numel() == 0


def test_a_device_pool_that_does_not_fit_names_its_option_and_the_numbers():
    with pytest.raises(ConfigError, match=r"device pool needs .*lower device_pages \(1000000000\)"):
        KvPools(SPEC, page_size=4096, num_pages=10**9, scratch_pages=1, poison=False)


def test_a_host_arena_that_does_not_fit_names_its_option(pools):
    with pytest.raises(ConfigError, match=r"host arena needs .*lower host_bytes"):
        HostArena.within(1 << 60, pools, chunk_size=8)


def test_memory_promised_to_the_device_counts_against_the_host():
    available = memory.available_bytes()
    assert available is not None
    memory.require_available(available // 2, what="host arena", option="host_bytes")
    with pytest.raises(ConfigError, match="already promised"):
        memory.require_available(
            available // 2, what="host arena", option="host_bytes", reserved_bytes=available
        )


def test_memory_that_the_system_refuses_is_a_config_error():
    with pytest.raises(ConfigError, match="the system refused"):
        memory.allocate(1 << 62, what="host arena", option="host_bytes")


def test_available_memory_is_the_least_of_machine_and_control_group(monkeypatch, tmp_path):
    assert memory.available_bytes() > 0
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    monkeypatch.setattr(memory, "_CGROUP_V2", tmp_path)
    assert memory.available_bytes() == 3_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() > 3_000_000


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(12, "12 bytes"), (1536, "1.5 KiB"), (1610612736, "1.5 GiB"), (1 << 50, "1.049e+06 GiB")],
)
def test_bytes_are_written_for_people(num_bytes, text):
    assert memory.format_bytes(num_bytes) == text
