"""What is said when a core is put together."""

import logging
import os
import threading

import pytest

from engine.assembly import core_from_model_dir
from engine.config import AttentionConfig, CacheConfig, EngineConfig, TransferConfig
from engine.errors import ConfigError


def lines_of(caplog, cache, workers="python"):
    with caplog.at_level(logging.INFO):
        core_from_model_dir(
            None,
            EngineConfig(cache=cache, transfer=TransferConfig(workers=workers), warm_up=False),
        ).close()
    return [record.getMessage() for record in caplog.records]


def test_sizes_of_both_tiers_are_in_the_log(caplog):
    cache = CacheConfig(
        device_pages=8, page_size=4, chunk_size=8, host_bytes=1 << 20, allow_small_pool=True
    )
    text = "\n".join(lines_of(caplog, cache))
    assert "device pool: 8 pages of 4 tokens" in text
    assert "chunks of 8 tokens, 1.0 MiB; copies by Python threads" in text


@pytest.mark.parametrize("host_bytes", [0, 100])
def test_a_host_tier_without_a_chunk_is_a_warning(caplog, host_bytes):
    cache = CacheConfig(
        device_pages=8, page_size=4, chunk_size=8, host_bytes=host_bytes, allow_small_pool=True
    )
    lines_of(caplog, cache)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(f"the host tier is empty: host_bytes is {host_bytes}" in line for line in warnings)


def test_a_pool_smaller_than_the_longest_history_is_refused():
    cache = CacheConfig(device_pages=127, page_size=32, host_bytes=0)
    with pytest.raises(ConfigError) as refused:
        core_from_model_dir(None, EngineConfig(cache=cache, warm_up=False))
    message = refused.value.message
    assert "device_pages is 127" in message and "4096 tokens, takes 128 pages of 32" in message
    assert "device_pages to 128" in message and "allow_small_pool to true" in message
    assert (refused.value.value, refused.value.limit) == (127, 128)


@pytest.mark.parametrize(
    "cache",
    [
        CacheConfig(device_pages=128, page_size=32, host_bytes=0),
        CacheConfig(device_pages=127, page_size=32, host_bytes=0, allow_small_pool=True),
        CacheConfig(device_pages=127, page_size=32, tiers="off"),
    ],
)
def test_a_pool_that_holds_it_or_need_not_is_taken(cache):
    core_from_model_dir(None, EngineConfig(cache=cache, warm_up=False)).close()


@pytest.mark.parametrize(
    "options",
    [
        {"attention": AttentionConfig(backend="nothing")},
        {"cache": CacheConfig(device_pages=1, host_bytes=0)},
        {"cache": CacheConfig(eviction_policy="nothing", host_bytes=0)},
    ],
)
def test_a_core_that_cannot_be_built_leaves_no_thread_and_no_open_file(options):
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError):
        core_from_model_dir(None, EngineConfig(**options, warm_up=False))
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
