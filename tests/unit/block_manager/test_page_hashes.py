"""The native chain of page hashes gives what the xxhash package gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

import engine
from engine.block_manager import page_hashes
from engine.block_manager.page_hashes import hash_pages, hash_pages_in_python, load_hash_chain

needs_library = pytest.mark.skipif(
    load_hash_chain(engine.__path__) is None, reason="installed without a C++ compiler"
)


def chained(rows: np.ndarray, page_size: int, count: int, seed: int) -> list[int]:
    raw = rows.tobytes()
    step = page_size * rows.shape[1] * 8
    hashes = [seed]
    for i in range(count):
        hashes.append(xxh3_64_intdigest(raw[i * step : (i + 1) * step], hashes[-1]))
    return hashes[1:]


@needs_library
@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize(
    ("page_size", "columns"),
    # 240 bytes are hashed in Python; 1024 are one block of XXH3, 1032 begin a second.
    [(1, 1), (30, 1), (31, 1), (4, 8), (1, 127), (32, 4), (43, 3), (64, 4), (1, 257), (257, 8)],
)
def test_pages_of_any_size_have_the_hashes_of_the_package(
    page_size: int, columns: int, seed: int
) -> None:
    rng = np.random.default_rng(page_size * columns)
    rows = rng.integers(-(2**63), 2**63 - 1, (5 * page_size, columns), dtype=np.int64)
    for hash_them in (hash_pages, hash_pages_in_python):
        hashes = np.zeros(4, dtype=np.uint64)
        hash_them(rows, page_size, seed, hashes)
        assert hashes.tolist() == chained(rows, page_size, 4, seed)


@needs_library
def test_long_pages_are_hashed_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        page_hashes, "_hash_chain", lambda rows, count, size, *rest: asked.append(size)
    )
    for page_size in (30, 31, 128):
        rows = np.zeros((page_size, 1), dtype=np.int64)
        hash_pages(rows, page_size, 0, np.zeros(1, dtype=np.uint64))
    assert asked == [248, 1024]


def test_no_pages_are_no_work() -> None:
    hash_pages(np.zeros((3, 40), dtype=np.int64), 8, 0, np.zeros(0, dtype=np.uint64))


def test_without_a_library_the_hashes_are_made_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_hash_chain([str(tmp_path)]) is None
    (tmp_path / "_engine_hash.so").write_bytes(b"not a library")
    assert load_hash_chain([str(tmp_path)]) is None
    monkeypatch.setattr(page_hashes, "_hash_chain", None)
    rows = np.random.default_rng(1).integers(0, 1 << 40, (64, 4), dtype=np.int64)
    hashes = np.zeros(2, dtype=np.uint64)
    hash_pages(rows, 32, 7, hashes)
    assert hashes.tolist() == chained(rows, 32, 2, 7)
