"""Conformance of the native kernels with the instruction set that ENGINE_CPU_ISA names.

    python tests/support/isa_conformance.py            # a few cases of every kind
    python tests/support/isa_conformance.py --all      # all of them
    python tests/support/isa_conformance.py --library build/emulated_avx512

A process has one instruction set for its life, so tests run this in processes of their own.
"""

from __future__ import annotations

import argparse

import torch

import engine
from engine.native_library import cpu_isa, load_library
from engine.testing.attention import CASES, check_backend

FEW = [
    case
    for case in CASES
    if case.page_size in (3, 5) or (case.bias is not None and case.score == "silu")
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--library", help="folder of a library to run instead of the installed one")
    options = parser.parse_args()
    if options.library is not None:
        engine.__path__.insert(0, options.library)
    missing = load_library()
    assert missing is None, missing
    results = check_backend("cpu", cases=CASES if options.all else FEW)
    failed = [str(result) for result in results if not result.passed]
    print(*failed, f"{cpu_isa()}: {len(results) - len(failed)} passed", sep="\n")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
