"""How near the paper's model comes to what its arithmetic costs at least.

    .venv/bin/python -m benchmarks.paper_model [--batch 8] [--layers 8] [--output FILE]

The model of MTServe's public code (8 layers, 4 heads of 128, hidden 1024, bf16), in the formulas of
`nvidia` and `meta`, with random weights. A step of `--batch` users goes through the runner (no
scheduler): `recompute` runs all rows of the histories and the candidates, `cached` only the new
rows and the candidates. The scores of both must agree.

The floor of a step is the time of its linear layers alone, measured with the engine's own linears
at the same rows, plus its visible attention FLOPs at 60 % of the measured FMA peak. Step, linears
and peak take turns. Exit status 1 when a step takes more than 1.33 times its floor.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import ceilings
from benchmarks.provenance import write_result
from benchmarks.timing import interleaved, rounded, timed
from engine.attention_backends.registry import attention_spec, create_backend
from engine.models.config import Feature, HstuLayers, Inputs, ModelConfig, RankHead
from engine.models.hstu.model import HstuModel
from engine.models.linear import Linear
from engine.platforms.cpu import HostArena, KvPools, Wake
from engine.request_builder import build_request
from engine.runner.runner import Runner
from engine.runner.step import PieceWork
from engine.testing.models import random_tensors
from engine.transfer.python import PythonCopyEngine
from engine.types import Float32Array, Task

LIMIT = 1.33
ATTENTION_SHARE_OF_PEAK = 0.6
PAGE_SIZE = 32
NUM_ITEMS = 10_000
FAMILIES = ("nvidia", "meta")
SCORE_TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}


class Load(NamedTuple):
    """One step: users, their histories (new rows included), candidates of each."""

    batch: int
    history: int
    new: int
    candidates: int

    def rows(self, first: int) -> int:
        """Rows of a step that computes the histories from row `first` on."""
        return self.batch * (self.history - first + self.candidates)

    def pairs(self, first: int) -> int:
        """Visible (row, key) pairs of that step."""
        history = (self.history * (self.history + 1) - first * (first + 1)) // 2
        return self.batch * (history + self.candidates * (self.history + 1))


def model_config(family: str, dtype: str, num_layers: int, load: Load) -> ModelConfig:
    assert family in ("nvidia", "meta") and dtype in ("bfloat16", "float32")
    return ModelConfig(
        name="paper",
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        layers=HstuLayers(
            family="nvidia" if family == "nvidia" else "meta",
            num_layers=num_layers,
            hidden_size=1024,
            num_heads=4,
            qk_dim=128,
            v_dim=128,
            scale_length=load.history,
        ),
        inputs=Inputs(
            features=(Feature(name="item", num_rows=NUM_ITEMS),),
            positions="from_start",
            num_positions=load.history + 1,
            max_history_events=load.history,
        ),
        rank=RankHead(kind="mlp"),
    )


class Steps:
    """A runner with its pools, and the two steps of a load."""

    def __init__(self, config: ModelConfig, load: Load, backend: str) -> None:
        self._load = load
        model = HstuModel(config, random_tensors(config))
        pages_per_user = -(-load.history // PAGE_SIZE)
        num_pages = load.batch * pages_per_user
        pools = KvPools(model.spec, PAGE_SIZE, num_pages, 1, False)
        arena = HostArena.within(0, pools, PAGE_SIZE)
        self._wake = Wake()
        self._copies = PythonCopyEngine(pools, arena, self._wake)
        attention = create_backend(backend, attention_spec(model.spec, PAGE_SIZE))
        self._runner = Runner(model, attention, pools, self._copies, time.monotonic)
        rng = np.random.default_rng(0)
        order = rng.permutation(num_pages).astype(np.int32)
        self._tables = order.reshape(load.batch, pages_per_user)
        self._prepared = [
            model.prepare(
                build_request(
                    task=Task.RANK,
                    user_id=user,
                    history=rng.integers(0, NUM_ITEMS, load.history) * 10 + 1,
                    candidates=rng.integers(0, NUM_ITEMS, load.candidates) * 10 + 1,
                )
            )
            for user in range(load.batch)
        ]

    def run(self, first: int) -> Float32Array:
        """A step that computes the histories from row `first` on; all scores."""
        works = [
            PieceWork(
                prepared=prepared,
                start=first,
                stop=self._load.history,
                suffix=np.arange(self._load.candidates),
                block_table=table,
                onload=None,
                task=Task.RANK,
                top_k=None,
                wants_user_embedding=False,
            )
            for prepared, table in zip(self._prepared, self._tables, strict=True)
        ]
        result = self._runner.run(works, scratch=False, copy_deadline_s=0.0)
        scores = [piece.scores for piece in result.pieces if piece.scores is not None]
        return np.concatenate(scores)

    def close(self) -> None:
        self._copies.close()
        self._wake.close()


class LayerLinears:
    """The two linear layers of one of the model's layers, on rows of their own."""

    def __init__(self, config: ModelConfig, num_rows: int) -> None:
        layers = config.layers
        dtype = getattr(torch, config.dtype)
        width = layers.num_heads * layers.v_dim
        parts = 3 if layers.family == "meta" else 1
        shapes = ((layers.hidden_size, 4 * width), (parts * width, layers.hidden_size))
        generator = torch.Generator().manual_seed(0)
        self._calls = [
            (
                Linear(torch.randn(*shape, generator=generator).to(dtype) / 32, None),
                torch.randn(num_rows, shape[0], generator=generator).to(dtype),
            )
            for shape in shapes
        ]
        self.flops = sum(2 * num_rows * width_in * width_out for width_in, width_out in shapes)

    def __call__(self) -> None:
        for layer, rows in self._calls:
            layer(rows)


@torch.inference_mode()
def measure_family(
    config: ModelConfig, load: Load, backend: str, threads: int, rounds: int
) -> dict[str, Any]:
    """Both steps of one family, their linears and the peak, in turns."""
    steps = Steps(config, load, backend)
    firsts = {"recompute": 0, "cached": load.history - load.new}
    linears = {name: LayerLinears(config, load.rows(first)) for name, first in firsts.items()}
    peak = ceilings.fma(ceilings.peak_isa(getattr(torch, config.dtype)), threads)
    error = _difference(steps.run(0), steps.run(firsts["cached"]))
    variants = {name: timed(functools.partial(steps.run, first)) for name, first in firsts.items()}
    variants |= {f"linear {name}": timed(layer) for name, layer in linears.items()}
    times = interleaved({**variants, "peak": peak.run}, rounds=rounds)
    steps.close()
    peak_gflops = peak.flops / times["peak"].min_s / 1e9
    heads, width = config.layers.num_heads, config.layers.qk_dim
    result: dict[str, Any] = {
        "family": config.layers.family,
        "peak_gflops": rounded(peak_gflops),
        "scores_relative_error": rounded(error, 2),
        "is_correct": error <= SCORE_TOLERANCE[config.dtype],
    }
    for name, first in firsts.items():
        linear_s = config.layers.num_layers * times[f"linear {name}"].min_s
        attention = 4 * width * heads * load.pairs(first) * config.layers.num_layers
        attention_s = attention / (ATTENTION_SHARE_OF_PEAK * peak_gflops * 1e9)
        step = times[name]
        result[name] = {
            "rows": load.rows(first),
            "step_s": {"min": rounded(step.min_s), "p10": rounded(step.p10_s),
                       "median": rounded(step.median_s), "runs": step.runs},
            "linear_gflop": rounded(config.layers.num_layers * linears[name].flops / 1e9),
            "linear_gflops": rounded(linears[name].flops / times[f"linear {name}"].min_s / 1e9),
            "linear_s": rounded(linear_s),
            "attention_gflop": rounded(attention / 1e9),
            "attention_s": rounded(attention_s),
            "floor_s": rounded(linear_s + attention_s),
            "over_floor": rounded(step.min_s / (linear_s + attention_s), 3),
        }  # fmt: skip
    return result


def _difference(one: Float32Array, other: Float32Array) -> float:
    """Root mean square of the difference over that of the values."""
    return float(np.sqrt(np.mean((one - other) ** 2) / np.mean(one**2)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--history", type=int, default=4096)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--candidates", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", help="write the result, with provenance, to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = Load(options.batch, options.history, options.new, options.candidates)
    jitter = ceilings.jitter()
    results = []
    for family in options.families:
        print(family, file=sys.stderr, flush=True)
        config = model_config(family, options.dtype, options.layers, load)
        results.append(
            measure_family(config, load, options.backend, options.threads, options.rounds)
        )
    missed = [
        f"{result['family']} {name}: over_floor is {result[name]['over_floor']}, the limit {LIMIT}"
        for result in results
        for name in ("recompute", "cached")
        if result[name]["over_floor"] > LIMIT
    ]
    missed += [f"{r['family']}: scores differ" for r in results if not r["is_correct"]]
    write_result(
        options.output,
        {
            "config": {"backend": options.backend, "dtype": options.dtype, **load._asdict(),
                       "layers": options.layers, "threads": options.threads,
                       "rounds": options.rounds},
            "jitter": jitter,
            "bf16_instruction": ceilings.has_bf16_instruction(),
            "families": results,
            "limits": {"over_floor": LIMIT, "scores_relative_error": SCORE_TOLERANCE,
                       "attention_share_of_peak": ATTENTION_SHARE_OF_PEAK},
            "missed": missed,
        },
    )  # fmt: skip
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
