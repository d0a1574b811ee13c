"""How fast one layer's attention is: against the FMA peak, a dense compiled form, and memory.

    .venv/bin/python -m benchmarks.attention [--score softmax] [--isa avx2] [--output FILE]

A ragged batch of 8 requests, histories of 3584 to 4608 rows (4096 on average) of which 128 are new,
256 candidates each, 8 heads, pages of 32, shuffled block tables; widths 64 and 128, bf16 and fp32.
Timed is append + attend + suffix of one layer; `prepare` is apart. FLOPs are 4 * width for each
visible (row, key, head). Beside it run the register FMA peak and the same step by `torch.compile`
of the padded dense form, in fp32 and, where the machine multiplies bf16, in that, whichever is
faster. Results are compared first. How many times faster has a limit only where the instructions in
use multiply bf16: without them the dense form in fp32 runs near the same peak.
`share_of_fma_beside` is for a machine that does something else as well: the FMAs take as long as
the layer, so they are disturbed as much; the peak is of short loops.

`single_row`: one row of one request over more than 128 MB of K/V, against the bandwidth of reading
that many bytes.

Exit status 1 when a result is wrong or a limit is missed. `--isa` runs under ENGINE_CPU_ISA, and
compares with the peak of those instructions.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Literal, NamedTuple

import torch

from benchmarks import ceilings
from benchmarks.dense_attention import DenseStep
from benchmarks.provenance import write_result
from benchmarks.ragged_batch import (
    BatchShape,
    LayerRun,
    RaggedBatch,
    ragged_lengths,
    relative_error,
)
from benchmarks.timing import Times, interleaved, rounded, timed
from engine.attention_backends.registry import create_backend

ISA_VARIABLE = "ENGINE_CPU_ISA"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TOLERANCES = {"bfloat16": 1e-2, "float32": 1e-5}
PEAK_SHARES = {
    ("bfloat16", 64): 0.55,
    ("bfloat16", 128): 0.65,
    ("float32", 64): 0.5,
    ("float32", 128): 0.5,
}
OVER_DENSE = {("bfloat16", 64): 5.0, ("bfloat16", 128): 3.5}
READ_SHARE = 0.7
SINGLE_ROW_TOKENS = 36_864


class Settings(NamedTuple):
    """What all measurements of a run share."""

    backend: str
    score: Literal["silu", "softmax"]
    isa: str | None
    threads: int
    rounds: int
    budget_s: float


@torch.inference_mode()
def measure_step(shape: BatchShape, dtype: str, settings: Settings) -> dict[str, Any]:
    """One width and dtype: the backend, the compiled dense form and the peak, in turns."""
    torch.compiler.reset()  # each shape is compiled anew, and torch gives up after 8 of a function
    ragged = RaggedBatch(shape, DTYPES[dtype], settings.score)
    run = LayerRun(ragged, create_backend(settings.backend, ragged.spec))
    multiplies_bf16 = dtype == "bfloat16" and ceilings.has_bf16_instruction()
    names = ("bfloat16", "float32") if multiplies_bf16 else ("float32",)
    dense = {name: DenseStep(ragged, DTYPES[name]) for name in names}
    error = relative_error(run.layer(), dense["float32"].rows())
    isa = ceilings.peak_isa(DTYPES[dtype], settings.isa)
    peak = ceilings.fma(isa, settings.threads)
    beside = ceilings.long_fma(isa, settings.threads, timed(run.layer)())
    times = interleaved(
        {
            "layer": timed(run.layer),
            "prepare": timed(run.prepare),
            "peak": peak.run,
            "beside": beside.run,
            **{f"dense {name}": timed(step) for name, step in dense.items()},
        },
        rounds=settings.rounds,
        budget_s=settings.budget_s,
    )
    peak_gflops = peak.flops / times["peak"].min_s / 1e9
    beside_gflops = beside.flops / times["beside"].min_s / 1e9
    gflops = shape.flops / times["layer"].min_s / 1e9
    dense_s = {name: times[f"dense {name}"].min_s for name in dense}
    fastest = min(dense_s, key=lambda name: dense_s[name])
    return {
        "dtype": dtype,
        "width": shape.width,
        "relative_error": rounded(error, 2),
        "is_correct": error <= TOLERANCES[dtype],
        "layer_s": _times(times["layer"]),
        "prepare_s": _times(times["prepare"]),
        "useful_gflops": rounded(gflops),
        "peak_isa": isa,
        "peak_gflops": rounded(peak_gflops),
        "share_of_peak": rounded(gflops / peak_gflops, 3),
        "share_of_fma_beside": rounded(gflops / beside_gflops, 3),
        "dense_s": {name: _times(times[f"dense {name}"]) for name in dense},
        "dense_dtype": fastest,
        "over_dense": rounded(dense_s[fastest] / times["layer"].min_s, 3),
    }


@torch.inference_mode()
def measure_single_row(tokens: int, settings: Settings) -> dict[str, Any]:
    """One new history row of one request: bytes of K/V a second, against reading them."""
    shape = BatchShape(lengths=(tokens,), new=1, candidates=0, num_heads=8, width=128)
    ragged = RaggedBatch(shape, torch.bfloat16, settings.score)
    run = LayerRun(ragged, create_backend(settings.backend, ragged.spec))
    num_bytes = tokens * shape.token_bytes
    memory = torch.ones(num_bytes, dtype=torch.uint8)
    times = interleaved(
        {"row": timed(run.layer), "read": ceilings.read(memory, settings.threads)},
        rounds=3 * settings.rounds,
        budget_s=settings.budget_s,
    )
    return {
        "tokens": tokens,
        "kv_bytes": num_bytes,
        "row_s": _times(times["row"]),
        "gb_s": rounded(num_bytes / times["row"].min_s / 1e9),
        "read_gb_s": rounded(num_bytes / times["read"].min_s / 1e9),
        "share_of_read": rounded(times["read"].min_s / times["row"].min_s, 3),
    }


def _times(times: Times) -> dict[str, float]:
    return {
        "min": rounded(times.min_s), "p10": rounded(times.p10_s),
        "median": rounded(times.median_s), "runs": times.runs,
    }  # fmt: skip


def limits_of(step: dict[str, Any]) -> dict[str, float]:
    """Field of a step -> its lower limit."""
    key = step["dtype"], step["width"]
    limits = {"share_of_peak": PEAK_SHARES.get(key)}
    if step["peak_isa"] == "avx512_bf16":
        limits["over_dense"] = OVER_DENSE.get(key)
    return {field: limit for field, limit in limits.items() if limit is not None}


def missed_limits(steps: list[dict[str, Any]], single_row: dict[str, Any] | None) -> list[str]:
    """What is below its limit, one line each; SiLU only."""
    missed = [
        f"{step['dtype']} {step['width']}: {field} is {step[field]}, the limit {limit}"
        for step in steps
        for field, limit in limits_of(step).items()
        if step[field] < limit
    ]
    if single_row is not None and single_row["share_of_read"] < READ_SHARE:
        share = single_row["share_of_read"]
        missed.append(f"single row: share_of_read is {share}, the limit {READ_SHARE}")
    return missed


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--score", choices=["silu", "softmax"], default="silu")
    parser.add_argument("--isa", choices=["base", "avx2", "avx512_bf16"])
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=sorted(DTYPES))
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--history", type=int, default=4096, help="mean; new rows included")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--candidates", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument(
        "--row-tokens", type=int, default=SINGLE_ROW_TOKENS, help="0: no single row"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--budget-s", type=float, default=60.0, help="of one variant")
    parser.add_argument("--output", help="write the result, with provenance, to this file")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    settings = Settings(
        options.backend, options.score, os.environ.get(ISA_VARIABLE), options.threads,
        options.rounds, options.budget_s,
    )  # fmt: skip
    jitter = ceilings.jitter()
    lengths = ragged_lengths(options.history, options.batch)
    steps = []
    for width in options.widths:
        shape = BatchShape(
            lengths=lengths, new=options.new, candidates=options.candidates,
            num_heads=options.heads, width=width,
        )  # fmt: skip
        for dtype in options.dtypes:
            print(f"{dtype}, width {width}", file=sys.stderr, flush=True)
            steps.append(measure_step(shape, dtype, settings))
    single_row = measure_single_row(options.row_tokens, settings) if options.row_tokens else None
    missed = missed_limits(steps, single_row) if options.score == "silu" else []
    wrong = [f"{s['dtype']} {s['width']}: wrong result" for s in steps if not s["is_correct"]]
    return {
        "config": {**settings._asdict(), "lengths": lengths, "new": options.new,
                   "candidates": options.candidates, "heads": options.heads},
        "jitter": jitter,
        "bf16_instruction": ceilings.has_bf16_instruction(),
        "steps": steps,
        "single_row": single_row,
        "limits": {
            "share_of_peak": {f"{d} {w}": limit for (d, w), limit in PEAK_SHARES.items()},
            "over_dense": {f"{d} {w}": limit for (d, w), limit in OVER_DENSE.items()},
            "share_of_read": READ_SHARE,
            "relative_error": TOLERANCES,
        },
        "missed": wrong + missed,
    }  # fmt: skip


def main() -> int:
    options = options_of(sys.argv[1:])
    if options.isa is not None and os.environ.get(ISA_VARIABLE) != options.isa:
        command = [sys.executable, "-m", "benchmarks.attention", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, ISA_VARIABLE: options.isa})
    torch.set_num_threads(options.threads)
    result = measure(options)
    write_result(options.output, result)
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
