"""What planning costs: one request's fingerprints, reservation and commit, by number of users.

    python benchmarks/planning.py [--users 1000 100000 1000000] [--samples 1000] [--output FILE]

Every user has a 4096-token state (pages of 32, chunks of 256) in both tiers, and the device pool
is exactly full. Timed is `HashChain.from_records` (int64 [L, 4]) + `reserve` + `commit` for users
drawn at random: "hit" asks for the 4096 tokens that are there; "append" brings 128 more, takes
their 4 pages from the least recent users and makes an offload job; copies are no bytes and are
not timed. The times are those of the quietest of 20 rounds of so many samples, fewer where there
are not as many users. Cost should not depend on the number of users. Memory is the growth of the
process by the filled block manager, over its device pages; each number of users has a process of
its own. A million users take some minutes and 10 GB.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import write_result
from engine.block_manager.fingerprint import HashChain
from engine.block_manager.manager import BlockManager
from engine.block_manager.user_state import UserKey
from engine.metrics import Metrics
from engine.transfer.jobs import CopyJob, CopyProgress
from engine.types import Int64Array

PAGE_SIZE = 32
PAGES_PER_CHUNK = 8
TOKENS = 4096
NEW_TOKENS = 128
COLUMNS = 4
ROUNDS = 20
PAUSE_S = 2.0
LIMIT_US = 40.0
LIMIT_BYTES_PER_PAGE = 24.0


class InstantCopies:
    """A copy engine without bytes: every job is complete at the next poll."""

    def __init__(self) -> None:
        self._jobs: list[CopyJob] = []

    def submit(self, job: CopyJob) -> None:
        job.handle = 0
        self._jobs.append(job)

    def cancel(self, job: CopyJob) -> bool:
        return False

    def poll(self) -> list[CopyProgress]:
        jobs, self._jobs = self._jobs, []
        return [CopyProgress(job, job.num_pages, True, None) for job in jobs]

    def wait_layer(self, job: CopyJob, layer: int, deadline_s: float) -> bool:
        return True

    def close(self) -> None:
        self._jobs = []


class Population:
    """A block manager whose users all have a state of `TOKENS` tokens."""

    def __init__(self, num_users: int) -> None:
        self.records = np.random.default_rng(0).integers(
            0, 1 << 40, size=(TOKENS + NEW_TOKENS, COLUMNS), dtype=np.int64
        )
        self.keys = [UserKey("", f"user-{i}", "v1") for i in range(num_users)]
        self.copies = InstantCopies()
        pages_per_user = TOKENS // PAGE_SIZE
        before = resident_bytes()
        self.manager = BlockManager(
            num_pages=num_users * pages_per_user,
            page_size=PAGE_SIZE,
            num_chunks=num_users * (pages_per_user // PAGES_PER_CHUNK + 1),
            pages_per_chunk=PAGES_PER_CHUNK,
            copies=self.copies,
            metrics=Metrics(),
            page_bytes_all_layers=1,
            clock=time.monotonic,
        )
        chain = HashChain.from_records(self.records[:TOKENS], b"v1", PAGE_SIZE)
        for key in self.keys:
            self.serve(key, chain)
        usage = self.manager.usage()
        assert usage.pages_free == 0
        assert usage.users_host == num_users
        self.bytes_per_user = (resident_bytes() - before) / num_users

    def serve(self, key: UserKey, chain: HashChain) -> None:
        """One request; its copies are complete afterwards."""
        reservation = self.manager.reserve(key, chain, stop=chain.length, protected=())
        assert reservation is not None
        if reservation.onload is not None:
            self.copies.submit(reservation.onload)
        offload = self.manager.commit(reservation)
        if offload is not None:
            self.copies.submit(offload)
        self.report()

    def report(self) -> None:
        for progress in self.copies.poll():
            self.manager.copy_progress(progress)

    def plan(self, key: UserKey, records: Int64Array) -> float:
        """Seconds to plan and commit one request."""
        began_s = time.perf_counter()
        chain = HashChain.from_records(records, b"v1", PAGE_SIZE)
        reservation = self.manager.reserve(key, chain, stop=chain.length, protected=())
        assert reservation is not None
        offload = self.manager.commit(reservation)
        took_s = time.perf_counter() - began_s
        for job in (reservation.onload, offload):
            if job is not None:
                self.copies.submit(job)
        self.report()
        return took_s

    def measure(self, length: int, samples: int) -> dict[str, float]:
        """Planning times for histories of `length` tokens, in microseconds.

        Of random users, each asked once in all rounds together.
        """
        order = iter(np.random.default_rng(length).permutation(len(self.keys)))
        times = quietest(
            lambda: [
                self.plan(self.keys[i], self.records[:length].copy())
                for i in islice(order, samples)
            ]
        )
        low, median, high = np.percentile(np.array(times) * 1e6, (10, 50, 99))
        return {
            "p10_us": round(float(low), 1),
            "p50_us": round(float(median), 1),
            "p99_us": round(float(high), 1),
        }


def quietest(measure: Callable[[], list[float]]) -> list[float]:
    """The round with the lowest median: what else runs on the machine only adds."""
    rounds = []
    for _ in range(ROUNDS):
        time.sleep(PAUSE_S)
        rounds.append(measure())
    return min(rounds, key=np.median)


def resident_bytes() -> int:
    """Resident memory of this process."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(num_users: int, samples: int) -> dict[str, Any]:
    note(f"{num_users} users: building their states")
    population = Population(num_users)
    note(f"{num_users} users: planning {ROUNDS} times {samples} requests of each kind")
    result = {
        "users": num_users,
        "hit": population.measure(TOKENS, samples),
        "append": population.measure(TOKENS + NEW_TOKENS, samples),
        "bytes_per_user": round(population.bytes_per_user),
        "bytes_per_page": round(population.bytes_per_user * PAGE_SIZE / TOKENS, 1),
    }
    note(f"{num_users} users: {result}; checking the books")
    population.manager.check_invariants(idle=True)
    return result


def fingerprint_time(samples: int) -> float:
    """Median microseconds of the fingerprints alone."""
    records = np.arange(TOKENS * COLUMNS, dtype=np.int64).reshape(TOKENS, COLUMNS)

    def measure() -> list[float]:
        times = []
        for _ in range(samples):
            began_s = time.perf_counter()
            HashChain.from_records(records, b"v1", PAGE_SIZE)
            times.append(time.perf_counter() - began_s)
        return times

    return round(float(np.median(quietest(measure))) * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of planning a request.")
    parser.add_argument("--users", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--output", help="write the result, with provenance, to this file")
    options = parser.parse_args()
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        samples = [min(options.samples, users // ROUNDS) for users in options.users]
        runs = list(processes.map(measure, options.users, samples))
    medians = [run["hit"]["p50_us"] for run in runs]
    bytes_per_page = runs[-1]["bytes_per_page"]
    write_result(
        options.output,
        {
            "config": {
                "page_size": PAGE_SIZE,
                "pages_per_chunk": PAGES_PER_CHUNK,
                "history_tokens": TOKENS,
                "new_tokens": NEW_TOKENS,
                "record_columns": COLUMNS,
                "samples": options.samples,
                "rounds": ROUNDS,
                "seed": 0,
            },
            "fingerprints_us": fingerprint_time(options.samples),
            "runs": runs,
            "limit_us": LIMIT_US,
            "limit_bytes_per_page": LIMIT_BYTES_PER_PAGE,
            "is_within_limit": max(medians) <= LIMIT_US and bytes_per_page <= LIMIT_BYTES_PER_PAGE,
            "largest_to_smallest": round(medians[-1] / medians[0], 2),
        },
    )


if __name__ == "__main__":
    main()
