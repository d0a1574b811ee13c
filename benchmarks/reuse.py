"""What reuse is worth: recompute, device hit, host hit, host hit without look-ahead, in one run.

    python -m benchmarks.reuse --model paper --output benchmarks/results/reuse_paper.json

Each mode is its own engine on the same model and the same requests: steps of `--batch` users, each
with a history of `--history` tokens of which `--new` are new, and `--candidates` candidates. Users
come in three groups that take turns. In `device_hit` the pool holds all groups; in the host modes
it holds two, so the group whose turn comes next must be loaded from the host while the current one
runs (or, without look-ahead, when its own turn comes). `recompute` keeps nothing. A step's time is
the time from the end of the step before it to its own end; the modes take turns round by round and
the smallest and the median time are reported.

Exit status 1 when a device hit reaches less than 0.85 of the FLOP ratio, or a host hit takes more
than 1.10 device hits, or more than a device hit and 1.5 times its copies at the rate of memcpy,
spread over the cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import ceilings
from benchmarks.provenance import write_result
from benchmarks.timing import interleaved, timed
from engine.assembly import Hooks
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core_parts import TraceEvent
from engine.engine import Engine
from engine.models.config import Feature, HstuLayers, Inputs, ModelConfig, RankHead
from engine.models.hstu.model import hstu_spec
from engine.models.linear import Linear
from engine.request_builder import build_request
from engine.testing.models import save_random_model
from engine.types import Request, Task

NUM_GROUPS = 3
PAGE_SIZE = 32
CHUNK_SIZE = 1024
NUM_ITEMS = 10_000
LAYERS = {
    "paper": {"num_layers": 8, "num_heads": 4, "qk_dim": 128, "v_dim": 128, "hidden_size": 1024},
    "small": {"num_layers": 4, "num_heads": 4, "qk_dim": 64, "v_dim": 64, "hidden_size": 256},
}
MODES = ("recompute", "device_hit", "host_hit", "host_hit_no_look_ahead")
MIN_SHARE_OF_FLOP_RATIO = 0.85
MAX_HOST_OVER_DEVICE = 1.10
MAX_COPIES_TIMES = 1.5


class Load(NamedTuple):
    """The shape of one step."""

    batch: int
    history: int
    new: int
    candidates: int

    @property
    def cached(self) -> int:
        return self.history - self.new


def model_config(name: str, load: Load) -> ModelConfig:
    return ModelConfig(
        name=name,
        dtype="bfloat16",
        layers=HstuLayers(family="nvidia", scale_length=load.history, **LAYERS[name]),
        inputs=Inputs(
            features=(Feature(name="item", num_rows=NUM_ITEMS),),
            positions="from_start",
            num_positions=load.history + 1,
            max_history_events=load.history,
        ),
        rank=RankHead(kind="mlp"),
    )


def flops(config: ModelConfig, load: Load, first_row: int) -> tuple[float, float]:
    """(linear, unmasked attention) FLOPs of a step that computes history from `first_row` on."""
    layers = config.layers
    width = layers.num_heads * (layers.qk_dim + layers.v_dim)
    per_row = 2 * layers.hidden_size * (2 * width + layers.num_heads * layers.v_dim)
    rows = load.history - first_row + load.candidates
    pairs = (load.history * (load.history + 1) - first_row * (first_row + 1)) // 2
    pairs += load.candidates * (load.history + 1)
    scale = load.batch * layers.num_layers
    return float(scale * per_row * rows), float(scale * 2 * width * pairs)


def engine_config(mode: str, load: Load) -> EngineConfig:
    group_pages = load.batch * -(-load.history // PAGE_SIZE)
    groups_on_device = {"recompute": 1, "device_hit": NUM_GROUPS}.get(mode, 2)
    rows = load.new if mode != "recompute" else load.history
    return EngineConfig(
        cache=CacheConfig(
            tiers={"recompute": "off", "device_hit": "device"}.get(mode, "tiered"),
            device_pages=group_pages * groups_on_device,
            page_size=PAGE_SIZE,
            chunk_size=CHUNK_SIZE,
            host_bytes=8 << 30,
        ),
        scheduler=SchedulerConfig(
            max_batch_requests=load.batch,
            max_batch_tokens=load.batch * (rows + load.candidates),
            max_piece_tokens=load.history,
            look_ahead=mode != "host_hit_no_look_ahead",
        ),
    )


class ModeRun:
    """One engine, its users, and the times of its steps."""

    def __init__(self, mode: str, path: str, config: ModelConfig, load: Load) -> None:
        self.mode = mode
        self._load = load
        self._random = np.random.default_rng(0)
        self._ends: list[float] = []
        settings = engine_config(mode, load)
        chunk_bytes = CHUNK_SIZE * config.layers.num_layers * 2 * 2 * config.layers.num_heads
        chunk_bytes *= config.layers.qk_dim
        chunks = NUM_GROUPS * load.batch * (-(-load.history // CHUNK_SIZE) + 1)
        cache = settings.cache
        settings = EngineConfig(
            cache=CacheConfig(
                tiers=cache.tiers,
                device_pages=cache.device_pages,
                page_size=cache.page_size,
                chunk_size=cache.chunk_size,
                host_bytes=chunks * chunk_bytes,
            ),
            scheduler=settings.scheduler,
        )
        hooks = Hooks(observer=self._observe)
        self.engine = Engine.from_model_dir(path, settings, hooks)
        self._prefix = {
            user: self._random.integers(0, NUM_ITEMS, load.cached) * 10 + 1
            for user in range(NUM_GROUPS * load.batch)
        }
        if mode != "recompute":
            for user, events in self._prefix.items():
                self.engine.prefetch(user_id=user, history=events)
            self.engine.drain_transfers()

    def _observe(self, event: TraceEvent) -> None:
        if event.kind == "run_end":
            self._ends.append(event.time_s)

    def _requests(self, num_steps: int) -> list[Request]:
        load = self._load
        requests = []
        for step in range(num_steps):
            for member in range(load.batch):
                user = step % NUM_GROUPS * load.batch + member
                new = self._random.integers(0, NUM_ITEMS, load.new) * 10 + 1
                requests.append(
                    build_request(
                        task=Task.RANK,
                        user_id=user,
                        history=np.concatenate([self._prefix[user], new]),
                        candidates=self._random.integers(0, NUM_ITEMS, load.candidates) * 10 + 1,
                    )
                )
        return requests

    def round(self, num_steps: int) -> tuple[list[float], dict[str, int]]:
        """Times of the steps after the first, and where their history tokens came from."""
        self._ends.clear()
        outcomes = self.engine.run(self._requests(num_steps))
        self.engine.drain_transfers()
        tokens = {"device": 0, "host": 0, "computed": 0}
        for outcome in outcomes[self._load.batch :]:
            assert outcome.response is not None, outcome.error
            usage = outcome.response.usage
            tokens["device"] += usage.device_tokens
            tokens["host"] += usage.host_tokens
            tokens["computed"] += usage.computed_tokens
        return np.diff(self._ends).tolist(), tokens


def peak_gflops(hidden_size: int, width: int, rows: int) -> float:
    """Best rate of the engine's own bf16 linear at the model's shape, in GFLOP/s."""
    x = torch.randn(rows, hidden_size).bfloat16()
    linear = Linear(torch.randn(hidden_size, width).bfloat16(), None)
    times = interleaved({"linear": timed(lambda: linear(x))}, rounds=10)
    return 2 * rows * hidden_size * width / times["linear"].min_s / 1e9


def copy_seconds(config: ModelConfig, load: Load) -> float:
    """Core seconds that memcpy needs for what a step onloads and offloads, a page at a time."""
    token_bytes = hstu_spec(config).bytes_per_token_layer
    source = torch.randint(0, 255, (256 << 20,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    pieces = ceilings.whole_pieces(source, target, PAGE_SIZE * token_bytes)
    times = interleaved({"memcpy": ceilings.copy(pieces)}, rounds=5)
    moved = load.batch * load.history * token_bytes * config.layers.num_layers
    return times["memcpy"].min_s * moved / source.nbytes


def measure(name: str, load: Load, rounds: int, steps: int) -> dict[str, Any]:
    config = model_config(name, load)
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    tokens: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as path:
        save_random_model(path, config)
        runs = [ModeRun(mode, path, config, load) for mode in MODES]
        for number in range(rounds + 1):
            for run in runs:
                num_steps = 2 if run.mode == "recompute" else steps
                measured, tokens[run.mode] = run.round(num_steps)
                if number > 0:
                    times[run.mode] += measured
                print(f"round {number} {run.mode}: {min(measured):.3f} s a step", flush=True)
        for run in runs:
            run.engine.close()
    return _report(config, load, times, tokens)


def _report(
    config: ModelConfig,
    load: Load,
    times: dict[str, list[float]],
    tokens: dict[str, dict[str, int]],
) -> dict[str, Any]:
    layers = config.layers
    width = layers.num_heads * (layers.qk_dim + layers.v_dim)
    peak = peak_gflops(layers.hidden_size, 2 * width, 4096)
    full, cached = flops(config, load, 0), flops(config, load, load.cached)
    best = {mode: min(times[mode]) for mode in MODES}
    modes = {}
    for mode in MODES:
        work = sum(full if mode == "recompute" else cached)
        modes[mode] = {
            "step_s_min": round(best[mode], 4),
            "step_s_median": round(statistics.median(times[mode]), 4),
            "steps": len(times[mode]),
            "unmasked_gflops": round(work / best[mode] / 1e9, 1),
            "floor_s": round(work / peak / 1e9, 4),
            "history_tokens": tokens[mode],
        }
    ratio = sum(full) / sum(cached)
    share = best["recompute"] / best["device_hit"] / ratio
    host_over_device = best["host_hit"] / best["device_hit"]
    copies_s = copy_seconds(config, load)
    most_added_s = MAX_COPIES_TIMES * copies_s / torch.get_num_threads()
    added_s = best["host_hit"] - best["device_hit"]
    return {
        "model": config.name,
        "layers": LAYERS[config.name],
        "load": load._asdict(),
        "peak_linear_gflops": round(peak, 1),
        "modes": modes,
        "unmasked_flop_ratio": round(ratio, 2),
        "recompute_over_device_hit": round(best["recompute"] / best["device_hit"], 2),
        "share_of_flop_ratio": round(share, 3),
        "host_hit_over_device_hit": round(host_over_device, 3),
        "no_look_ahead_over_device_hit": round(
            best["host_hit_no_look_ahead"] / best["device_hit"], 3
        ),
        "host_hit_adds_s": round(added_s, 4),
        "memcpy_core_s": round(copies_s, 4),
        "limits": {
            "share_of_flop_ratio": MIN_SHARE_OF_FLOP_RATIO,
            "host_hit_over_device_hit": MAX_HOST_OVER_DEVICE,
            "host_hit_adds_s": round(most_added_s, 4),
        },
        "is_within_limits": share >= MIN_SHARE_OF_FLOP_RATIO
        and host_over_device <= MAX_HOST_OVER_DEVICE
        and added_s <= most_added_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(LAYERS), default="small")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--history", type=int, default=4096)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--candidates", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7, help="steps of a round (recompute: 2)")
    parser.add_argument("--output", help="write the result, with provenance, to this file")
    options = parser.parse_args()
    if options.steps < 2 or options.rounds < 1:
        parser.error("give at least 2 steps (the first of a round is not measured) and 1 round")
    load = Load(options.batch, options.history, options.new, options.candidates)
    result = measure(options.model, load, options.rounds, options.steps)
    write_result(options.output, result)
    return 0 if result["is_within_limits"] else 1


if __name__ == "__main__":
    sys.exit(main())
