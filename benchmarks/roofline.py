"""What this machine can do at most: FMAs, reads, copies, linear layers, and its jitter.

    .venv/bin/python -m benchmarks.roofline [--rounds 30] [--output FILE]

Every other benchmark measures the ceilings it needs again in its own run, beside what it compares
with them; this script is the overview. All rates are of the smallest time of `--rounds` runs, and
variants of a group take turns.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch

from benchmarks import ceilings
from benchmarks.provenance import write_result
from benchmarks.timing import interleaved, rounded, timed
from engine.models.linear import Linear, has_prepacked

LARGE_BYTES = 256 << 20
PIECE_BYTES = (64 << 10, 512 << 10, 2 << 20)
LINEAR_SHAPES = ((3072, 1024, 2048), (3072, 512, 1024), (128, 1024, 2048), (16, 1024, 2048))
"""(rows, in, out): the paper's model over 8 users' new rows, its output, few rows."""


def memory_gb_s(threads: int, rounds: int) -> dict[str, Any]:
    """Read bandwidth on one and on all threads; memcpy of one thread (copied bytes)."""
    source = torch.ones(LARGE_BYTES, dtype=torch.uint8)
    target = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    pieces = {
        size: ceilings.whole_pieces(source, target, size) for size in (*PIECE_BYTES, LARGE_BYTES)
    }
    variants = {f"read {count}": ceilings.read(source, count) for count in {1, threads}}
    variants |= {f"copy {size}": ceilings.copy(cut) for size, cut in pieces.items()}
    times = interleaved(variants, rounds=rounds)

    def rate(name: str) -> float:
        return rounded(LARGE_BYTES / times[name].min_s / 1e9)

    return {
        "bytes": LARGE_BYTES,
        "read": {str(count): rate(f"read {count}") for count in sorted({1, threads})},
        "memcpy_by_piece_bytes": {str(size): rate(f"copy {size}") for size in pieces},
    }


@torch.inference_mode()
def linear_gflops(dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Rates of the engine's linear layer, by "rows x in x out"."""
    generator = torch.Generator().manual_seed(0)
    variants, flops = {}, {}
    for rows, width_in, width_out in LINEAR_SHAPES:
        layer = Linear(torch.randn(width_in, width_out, generator=generator).to(dtype), None)
        x = torch.randn(rows, width_in, generator=generator).to(dtype)
        name = f"{rows} x {width_in} x {width_out}"
        variants[name] = timed(functools.partial(layer, x))
        flops[name] = 2 * rows * width_in * width_out
    times = interleaved(variants, rounds=rounds, budget_s=10.0)
    return {name: rounded(flops[name] / times[name].min_s / 1e9) for name in variants}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", help="write the result, with provenance, to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    jitter = ceilings.jitter()
    fma = ceilings.fma_gflops(sorted({1, options.threads}), options.rounds)
    best = {
        name: fma[ceilings.peak_isa(dtype)][str(options.threads)]
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }
    write_result(
        options.output,
        {
            "config": {"threads": options.threads, "rounds": options.rounds},
            "jitter": jitter,
            "fma_gflops": fma,
            "bf16_instruction": ceilings.has_bf16_instruction(),
            "fma_peak_gflops": best,
            "memory_gb_s": memory_gb_s(options.threads, options.rounds),
            "linear_gflops": {
                str(dtype).removeprefix("torch."): linear_gflops(dtype, options.rounds)
                for dtype in (torch.float32, torch.bfloat16)
            },
            "linear_is_prepacked": {
                str(dtype).removeprefix("torch."): has_prepacked(dtype)
                for dtype in (torch.float32, torch.bfloat16)
            },
        },
    )


if __name__ == "__main__":
    main()
