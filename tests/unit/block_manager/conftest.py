"""Fixtures of the block manager's tests."""

from __future__ import annotations

import pytest
from block_harness import Blocks


@pytest.fixture
def blocks() -> Blocks:
    """16 pages of 4 tokens, 16 chunks of 8 tokens."""
    return Blocks()
