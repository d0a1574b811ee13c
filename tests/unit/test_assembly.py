"""What is said when a core is put together."""

import logging

import pytest

from engine.assembly import core_from_model_dir
from engine.config import CacheConfig, EngineConfig, TransferConfig


def lines_of(caplog, cache, workers="python"):
    with caplog.at_level(logging.INFO):
        core_from_model_dir(
            None, EngineConfig(cache=cache, transfer=TransferConfig(workers=workers))
        ).close()
    return [record.getMessage() for record in caplog.records]


def test_sizes_of_both_tiers_are_in_the_log(caplog):
    cache = CacheConfig(device_pages=8, page_size=4, chunk_size=8, host_bytes=1 << 20)
    text = "\n".join(lines_of(caplog, cache))
    assert "device pool: 8 pages of 4 tokens" in text
    assert "chunks of 8 tokens, 1.0 MiB; copies by Python threads" in text


@pytest.mark.parametrize("host_bytes", [0, 100])
def test_a_host_tier_without_a_chunk_is_a_warning(caplog, host_bytes):
    lines_of(caplog, CacheConfig(device_pages=8, page_size=4, chunk_size=8, host_bytes=host_bytes))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(f"the host tier is empty: host_bytes is {host_bytes}" in line for line in warnings)
