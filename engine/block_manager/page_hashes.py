"""The hashes of a history's pages, one seeded with the other, in native code where that is there.

Both ways give the same hashes. The library needs no torch, and keeps the GIL: a whole history takes
it microseconds, and who lets go of the GIL may wait milliseconds to have it back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path

from xxhash import xxh3_64_intdigest

import engine
from engine.types import Int64Array, Uint64Array

_LIBRARY = "_engine_hash.so"
_NATIVE_FROM_BYTES = 241  # shorter inputs have an XXH3 of their own


def hash_pages(rows: Int64Array, page_size: int, seed: int, hashes: Uint64Array) -> None:
    """Fill `hashes`, uint64 [n]: entry i is xxh3_64 of page i, seeded with the entry before.

    rows: [>= n * page_size, W], C-contiguous. seed: of the first page. hashes: C-contiguous.
    """
    page_bytes = page_size * rows.shape[1] * rows.itemsize
    if _hash_chain is not None and page_bytes >= _NATIVE_FROM_BYTES:
        _hash_chain(rows.ctypes.data, len(hashes), page_bytes, seed, hashes.ctypes.data)
    else:
        hash_pages_in_python(rows, page_size, seed, hashes)


def hash_pages_in_python(rows: Int64Array, page_size: int, seed: int, hashes: Uint64Array) -> None:
    """The same, without the library."""
    for page in range(len(hashes)):
        begin = page * page_size
        seed = xxh3_64_intdigest(rows[begin : begin + page_size].data, seed)
        hashes[page] = seed


def is_native() -> bool:
    """Whether the library was loaded; only its speed is another."""
    return _hash_chain is not None


def load_hash_chain(folders: Iterable[str]) -> Callable[..., None] | None:
    """`mtserve_hash_chain` of csrc/cpu/fingerprint.h from the first folder that has the library.

    None: there is none (installed without a C++ compiler), or it cannot be loaded.
    """
    for folder in folders:
        if (Path(folder) / _LIBRARY).exists():
            try:
                function = ctypes.PyDLL(str(Path(folder) / _LIBRARY)).mtserve_hash_chain
            except (OSError, AttributeError):
                return None
            pointer, number = ctypes.c_void_p, ctypes.c_int64
            function.argtypes = (pointer, number, number, ctypes.c_uint64, pointer)
            function.restype = None
            return function
    return None


_hash_chain = load_hash_chain(engine.__path__)
