"""What copies between the tiers cost, against memcpy of the same bytes.

    .venv/bin/python -m benchmarks.copies [--tokens 4096] [--output FILE]

One user's state of the paper's model (8 layers, 4 heads of 128, bf16: 64 KiB a page and layer) is
onloaded and offloaded by the engine's native copy engine, one job each, from submission to its end.
`chunks`: the pages of a chunk are neighbours on the device too, so the job moves whole layers of
chunks. `scattered`: device pages are shuffled, so it moves single pages; for information.

Beside each runs memcpy on one thread of the very same pieces (same addresses, one call a piece),
and, for information, of as many bytes in one call, which the C library may do past the caches.
All take turns. Several users take turns too, so that no copy finds its bytes in the cache.

Exit status 1 when bytes arrive wrong, or a job at chunk granularity is slower than 0.85 of memcpy.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from benchmarks import ceilings
from benchmarks.ceilings import CopyPieces
from benchmarks.paper_model import Load, model_config
from benchmarks.provenance import write_result
from benchmarks.timing import Times, interleaved, rounded
from engine.models.hstu.model import hstu_spec
from engine.platforms.cpu import HostArena, KvPools, Wake
from engine.transfer.jobs import CopyJob, Direction
from engine.transfer.native import NativeCopyEngine
from engine.types import Int32Array

LIMIT = 0.85
PAGE_SIZE = 32
NUM_USERS = 4
_TIMEOUT_S = 30.0

Order = Literal["chunks", "scattered"]
ORDERS: tuple[Order, ...] = ("chunks", "scattered")


class Tiers:
    """Both tiers, filled with random bytes, and the copy engine between them.

    A user's chunks follow each other in the arena. On the device its pages follow each other
    (`chunks`) or are anywhere among all pages (`scattered`).
    """

    def __init__(self, tokens: int, chunk_size: int) -> None:
        spec = hstu_spec(model_config("nvidia", "bfloat16", 8, Load(1, tokens, 1, 1)))
        self.num_pages = tokens // PAGE_SIZE
        self.pages_per_chunk = chunk_size // PAGE_SIZE
        total = NUM_USERS * self.num_pages
        self.pools = KvPools(spec, PAGE_SIZE, total, 1, False)
        self.arena = HostArena(
            num_chunks=total // self.pages_per_chunk,
            num_layers=spec.num_layers,
            pages_per_chunk=self.pages_per_chunk,
            page_bytes=self.pools.page_bytes,
        )
        self.wake = Wake()
        self.copies = NativeCopyEngine(self.pools, self.arena, self.wake)
        self._shuffled = np.random.default_rng(0).permutation(total).astype(np.int32)
        generator = torch.Generator().manual_seed(0)
        for layer in range(spec.num_layers):
            self.pools.raw(layer).random_(generator=generator)
        self.arena.chunks.random_(generator=generator)

    @property
    def user_bytes(self) -> int:
        return self.num_pages * self.pools.page_bytes * self.pools.num_layers

    def job(self, direction: Direction, order: Order, user: int) -> CopyJob:
        slots = np.arange(user * self.num_pages, (user + 1) * self.num_pages, dtype=np.int32)
        return CopyJob(
            direction=direction,
            first_page=0,
            pages=slots if order == "chunks" else self._shuffled[slots],
            host_slots=slots,
            owner=None,
            branch=0,
        )

    def run(self, job: CopyJob) -> float:
        """Seconds from submission until the job has ended. An onload is waited for as the layer
        loop does it, an offload as the core does."""
        began_s = time.perf_counter()
        self.copies.submit(job)
        if job.direction is Direction.ONLOAD:
            last = self.pools.num_layers - 1
            assert self.copies.wait_layer(job, last, time.monotonic() + _TIMEOUT_S)
        took_s = time.perf_counter() - began_s
        while job.succeeded is None:
            assert self.wake.wait(_TIMEOUT_S), "the copy engine is silent"
            self.wake.clear()
            self.copies.poll()
        assert job.succeeded
        return took_s if job.direction is Direction.ONLOAD else time.perf_counter() - began_s

    def run_fresh(self, direction: Direction, order: Order, user: int) -> float:
        """A new job, run; a job runs once."""
        return self.run(self.job(direction, order, user))

    def pieces(self, job: CopyJob, pages_per_piece: int) -> CopyPieces:
        """The job's bytes as pieces of neighbouring pages, layer after layer."""
        first = np.arange(0, self.num_pages, pages_per_piece)
        device = [
            self.pools.raw(layer).data_ptr() + job.pages[first].astype(np.int64) * self._page_bytes
            for layer in range(self.pools.num_layers)
        ]
        host = [self._host_address(job.host_slots[first], layer) for layer in range(len(device))]
        ends = [np.concatenate(device).astype(np.uint64), np.concatenate(host).astype(np.uint64)]
        if job.direction is Direction.ONLOAD:
            ends.reverse()
        return CopyPieces(ends[0], ends[1], pages_per_piece * self._page_bytes)

    def is_equal(self, job: CopyJob) -> bool:
        """Both ends of a job that has ended hold the same bytes."""
        pages = torch.from_numpy(job.pages).long()
        slots = torch.from_numpy(job.host_slots).long()
        chunk, place = slots // self.pages_per_chunk, slots % self.pages_per_chunk
        return all(
            torch.equal(self.pools.raw(layer)[pages], self.arena.chunks[chunk, layer, place])
            for layer in range(self.pools.num_layers)
        )

    def close(self) -> None:
        self.copies.close()
        self.wake.close()

    @property
    def _page_bytes(self) -> int:
        return self.pools.page_bytes

    def _host_address(self, slots: Int32Array, layer: int) -> np.ndarray:
        chunk, place = np.divmod(slots.astype(np.int64), self.pages_per_chunk)
        page = (chunk * self.pools.num_layers + layer) * self.pages_per_chunk + place
        return page * self._page_bytes + self.arena.chunks.data_ptr()


def measure(tiers: Tiers, rounds: int) -> dict[str, Any]:
    """All jobs and their memcpys in turns."""
    variants: dict[str, Callable[[], float]] = {}
    results: dict[str, Any] = {}
    for direction, order in itertools.product(Direction, ORDERS):
        jobs = [tiers.job(direction, order, user) for user in range(NUM_USERS)]
        size = tiers.pages_per_chunk if order == "chunks" else 1
        name = f"{direction.value} {order}"
        tiers.run(jobs[0])
        results[name] = {
            "piece_bytes": size * tiers.pools.page_bytes,
            "is_correct": tiers.is_equal(jobs[0]),
        }
        variants[name] = _in_turn(
            [functools.partial(tiers.run_fresh, direction, order, u) for u in range(NUM_USERS)]
        )
        variants[f"memcpy {name}"] = _in_turn(
            [ceilings.copy(tiers.pieces(job, size)) for job in jobs]
        )
    source = torch.ones(NUM_USERS, tiers.user_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    variants["memcpy whole"] = _in_turn(
        [
            ceilings.copy(ceilings.whole_pieces(source[user], target[user], tiers.user_bytes))
            for user in range(NUM_USERS)
        ]
    )
    times = interleaved(variants, rounds=rounds)
    whole_s = times["memcpy whole"].min_s
    for name, result in results.items():
        memcpy_s = times[f"memcpy {name}"].min_s
        result |= {
            "job_s": _times(times[name]),
            "gb_s": rounded(tiers.user_bytes / times[name].min_s / 1e9),
            "memcpy_gb_s": rounded(tiers.user_bytes / memcpy_s / 1e9),
            "share_of_memcpy": rounded(memcpy_s / times[name].min_s, 3),
            "share_of_whole_memcpy": rounded(whole_s / times[name].min_s, 3),
        }
    return {"whole_memcpy_gb_s": rounded(tiers.user_bytes / whole_s / 1e9), "jobs": results}


def _in_turn(variants: list[Callable[[], float]]) -> Callable[[], float]:
    """Each call runs the next of them."""
    endless = itertools.cycle(variants)
    return lambda: next(endless)()


def _times(times: Times) -> dict[str, float]:
    return {
        "min": rounded(times.min_s), "p10": rounded(times.p10_s),
        "median": rounded(times.median_s), "runs": times.runs,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of a user")
    parser.add_argument("--chunk-size", type=int, default=256, help="tokens of a chunk")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", help="write the result, with provenance, to this file")
    options = parser.parse_args()
    if options.tokens % options.chunk_size or options.chunk_size % PAGE_SIZE:
        parser.error(f"--tokens are whole chunks, a chunk is whole pages of {PAGE_SIZE}")
    jitter = ceilings.jitter()
    tiers = Tiers(options.tokens, options.chunk_size)
    result = measure(tiers, options.rounds)
    missed = [f"{name}: wrong bytes" for name, job in result["jobs"].items()
              if not job["is_correct"]]  # fmt: skip
    for direction in Direction:
        share = result["jobs"][f"{direction.value} chunks"]["share_of_memcpy"]
        if share < LIMIT:
            missed.append(f"{direction.value}: share_of_memcpy is {share}, the limit {LIMIT}")
    write_result(
        options.output,
        {
            "config": {"tokens": options.tokens, "chunk_size": options.chunk_size,
                       "page_size": PAGE_SIZE, "users": NUM_USERS, "rounds": options.rounds,
                       "job_bytes": tiers.user_bytes},
            "jitter": jitter,
            **result,
            "limits": {"share_of_memcpy": LIMIT},
            "missed": missed,
        },
    )  # fmt: skip
    tiers.close()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
