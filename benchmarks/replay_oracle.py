"""Token hits on real logs: the engine's planning against the plain-Python policy oracle.

    python -m benchmarks.replay_oracle LOG [--max-requests N] [--concurrency N]

Replays a whole interaction log through the real core, scheduler, block manager and fingerprints
(`engine.testing.layerless`: only the layers and the bytes are left out), one request at a time and
concurrently, device only and with a bounded host tier, at three sizes each. One at a time the
totals must equal the oracle's; concurrently they must be within 0.5 % of the history tokens.
Prints a line of JSON per run and exits with 1 if one is off.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import tyro

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.entrypoints.log_requests import TokensByTier, Trace
from engine.entrypoints.logs import TraceRequest, UserEvents, by_user, read_log, trace_requests
from engine.entrypoints.replay import Account, ReplayOptions, replay_trace, scheduler_config
from engine.errors import EngineError
from engine.models.base import Model
from engine.models.config import Feature, HstuLayers, Inputs, ModelConfig, RetrieveHead
from engine.models.registry import model_factory
from engine.testing.layerless import layerless_core
from engine.testing.models import random_tensors
from engine.testing.oracle import Oracle

TOLERANCE = 0.005
_WINDOW_S = 60


class Sizes(NamedTuple):
    """Device pages and host chunks (none: device only); tokens of a page and of a chunk."""

    pages: int
    chunks: int
    page_size: int
    chunk_size: int


@dataclass(frozen=True, slots=True, eq=False)
class RealLog:
    """A log as users and requests, and a one-layer model whose catalogue covers it."""

    users: list[UserEvents]
    requests: list[TraceRequest]
    model: Model

    @classmethod
    def read(cls, path: Path, *, max_requests: int = 0) -> RealLog:
        log = read_log(path)
        requests = trace_requests(log, _WINDOW_S)
        return cls(by_user(log), requests[: max_requests or None], _model(np.unique(log.items)))

    @property
    def num_tokens(self) -> int:
        """Tokens of the histories of all users as they are after the last request."""
        last_length = {user: length for user, length, _ in self.requests}
        return sum(last_length.values())


def _model(item_ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Model:
    config = ModelConfig(
        name="covers-the-log",
        layers=HstuLayers(
            family="meta", num_layers=1, hidden_size=8, num_heads=1, qk_dim=8, v_dim=8,
            scale_length=64,
        ),
        inputs=Inputs(
            features=(Feature(name="item", num_rows=len(item_ids)),), positions="from_start",
            num_positions=4097, max_history_events=4096,
        ),
        retrieve=RetrieveHead(),
    )  # fmt: skip
    tensors = random_tensors(config) | {"catalogue.item_ids": torch.from_numpy(item_ids)}
    return model_factory("hstu")(msgspec.to_builtins(config), tensors, config.name)


def engine_tokens(
    log: RealLog, sizes: Sizes, *, sequential: bool, concurrency: int = 16
) -> TokensByTier:
    """Where the engine finds the history tokens of all requests."""
    options = ReplayOptions(
        model="in memory", trace="in memory", sequential=sequential, concurrency=concurrency
    )
    config = EngineConfig(
        cache=CacheConfig(
            tiers="tiered" if sizes.chunks else "device",
            device_pages=sizes.pages,
            page_size=sizes.page_size,
            chunk_size=sizes.chunk_size,
            allow_small_pool=True,
        ),
        scheduler=scheduler_config(options),
    )
    trace = Trace(users=log.users, requests=log.requests, picked=np.zeros(len(log.requests), bool))
    account = Account()
    with Engine(layerless_core(log.model, config, num_chunks=sizes.chunks)) as engine:
        replay_trace(engine, trace, options, account)
        engine.drain_transfers()
    if account.failed:
        raise RuntimeError(f"requests failed: {account.failed}")
    return account.tokens


def oracle_tokens(log: RealLog, sizes: Sizes) -> TokensByTier:
    """Where the policy says they are, one request at a time."""
    oracle = Oracle(
        num_pages=sizes.pages,
        page_size=sizes.page_size,
        num_chunks=sizes.chunks,
        pages_per_chunk=sizes.chunk_size // sizes.page_size,
    )
    items = [user.items.tolist() for user in log.users]
    for user, length, _ in log.requests:
        oracle.request(user, items[user][:length])
    return TokensByTier(
        history=oracle.totals.history_tokens,
        device=oracle.totals.device_tokens,
        host=oracle.totals.host_tokens,
        computed=oracle.totals.computed_tokens,
    )


def three_sizes(log: RealLog, *, has_host: bool) -> list[Sizes]:
    """Device pools for 5, 15 and 40 % of all tokens of the log, host tiers twice as large."""
    page_size, chunk_size = 8, 64
    sizes = []
    for share in (0.05, 0.15, 0.4):
        pages = max(200, int(share * log.num_tokens / page_size))
        chunks = 2 * pages * page_size // chunk_size
        sizes.append(Sizes(pages, chunks if has_host else 0, page_size, chunk_size))
    return sizes


def largest_difference(left: TokensByTier, right: TokensByTier) -> float:
    """Of the tokens found on the device, on the host, and anywhere; as shares of the history."""
    pairs = [
        (left.device, right.device),
        (left.host, right.host),
        (left.computed, right.computed),
    ]
    return max(abs(a - b) for a, b in pairs) / max(1, right.history)


def compare(log: RealLog, *, concurrency: int) -> Iterator[dict[str, object]]:
    """A record for each run; `ok` says whether it is as close as it must be."""
    for sizes in three_sizes(log, has_host=False) + three_sizes(log, has_host=True):
        expected = oracle_tokens(log, sizes)
        for sequential in (True, False):
            started_s = time.monotonic()
            found = engine_tokens(log, sizes, sequential=sequential, concurrency=concurrency)
            off = largest_difference(found, expected)
            yield {
                "sizes": sizes._asdict(),
                "mode": "sequential" if sequential else f"{concurrency} in flight",
                "engine": msgspec.to_builtins(found),
                "oracle": msgspec.to_builtins(expected),
                "largest_difference": off,
                "ok": off == 0.0 if sequential else off <= TOLERANCE,
                "seconds": round(time.monotonic() - started_s, 1),
            }


def main(log: Path, /, max_requests: int = 0, concurrency: int = 16) -> None:
    """Compare on one log; see the module's text.

    Args:
        log: Interaction log: csv, tsv or `::`, with user, item, rating or action, time.
        max_requests: Only the first so many requests; 0 for all.
        concurrency: Requests in flight in the concurrent runs.
    """
    try:
        real_log = RealLog.read(log, max_requests=max_requests)
    except EngineError as error:
        sys.exit(str(error))
    is_ok = True
    for record in compare(real_log, concurrency=concurrency):
        print(json.dumps(record), flush=True)
        is_ok = is_ok and bool(record["ok"])
    sys.exit(0 if is_ok else 1)


if __name__ == "__main__":
    tyro.cli(main)
