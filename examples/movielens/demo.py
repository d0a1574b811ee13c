"""A trained recommender, served with tiered user state: `make demo`.

    fetch MovieLens-100K -> train a small HSTU -> save a model directory -> evaluate it through the
    engine with the cache off, on the device only, and tiered -> start the real server in each of
    the three modes -> replay real users' requests against them -> print what it was worth

`--short` runs the same path with less training and fewer requests.

The replay takes the users with the longest histories, which is what the engine is for (`--users`
says how many). MovieLens users rated in one sitting each, one user after the other, while the users
of a live service come at the same time; so their requests are mixed at random, each user's own
order kept (`--log-order` keeps the log's). Before the clock starts, every user's history so far is
sent once: what is measured is the steady state.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from data import DEFAULT_CACHE, FetchError, fetch
from server import Replayed, UserRequest, replay, serving
from tqdm import tqdm
from train import Quality, TrainOptions, export, measure, train

from engine.config import CacheConfig, EngineConfig
from engine.entrypoints import evaluate
from engine.entrypoints.logs import (
    InteractionLog,
    TraceRequest,
    UserEvents,
    by_user,
    k_core,
    read_log,
    trace_requests,
)

MODES = ("off", "device", "tiered")
MIN_COUNT = 5
WINDOW_S = 60
SEED = 7
BLOCK = 250
# Histories are short here (median 65 events): small pages and chunks, and a device pool that
# holds a fraction of the users' state, so that the host tier has work to do.
PAGE_SIZE, CHUNK_SIZE, DEVICE_PAGES, HOST_BYTES = 8, 64, 1800, 1 << 28
# Scores are equal in every bit, unless the processor has no bit-stable matrix products (the server
# says so at start).
TOLERANCE = 1e-5


class Arguments(NamedTuple):
    short: bool
    log_order: bool
    users: int
    requests: int
    workers: int
    epochs: int
    threads: int


class Workload(NamedTuple):
    """What is sent to the server: the warm-up, then the measured requests."""

    warm_up: list[UserRequest]
    measured: list[UserRequest]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    try:
        path = fetch()
    except FetchError as error:
        raise SystemExit(str(error)) from None
    log = k_core(read_log(path), MIN_COUNT)
    users = by_user(log)
    print(f"MovieLens-100K: {log.num_events} ratings of {len(users)} users, {MIN_COUNT}-core")
    model = DEFAULT_CACHE / ("model-short" if arguments.short else "model")
    trained = train_and_save(users, model, arguments)
    evaluated = {mode: evaluate_mode(mode, model, path) for mode in MODES}
    workload = make_workload(log, users, arguments)
    replayed = replay_modes(model, workload, arguments)
    print_report(trained, evaluated, replayed, arguments)
    check(trained, evaluated, replayed)


def parse_arguments() -> Arguments:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="less training, fewer requests")
    parser.add_argument("--log-order", action="store_true", help="replay in the log's own order")
    parser.add_argument(
        "--users", type=int, default=300, help="users replayed, the longest histories first (300)"
    )
    parser.add_argument("--requests", type=int, help="requests measured (6000; 300 with --short)")
    parser.add_argument("--workers", type=int, default=16, help="connections of the replay (16)")
    parser.add_argument("--epochs", type=int, help="passes over the log (16; 2 with --short)")
    parser.add_argument("--threads", type=int, default=1, help="threads of training (1)")
    given = parser.parse_args()
    return Arguments(
        short=given.short,
        log_order=given.log_order,
        users=given.users,
        requests=given.requests or (300 if given.short else 6000),
        workers=given.workers,
        epochs=given.epochs or (2 if given.short else TrainOptions().epochs),
        threads=given.threads,
    )


def train_and_save(users: list[UserEvents], model: Path, arguments: Arguments) -> Quality:
    """Train, write the model directory, and measure the training model itself."""
    options = TrainOptions(epochs=arguments.epochs)
    started_s = time.monotonic()
    with tqdm(total=options.epochs, desc="train", unit="epoch") as bar:

        def on_epoch(_: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()

        recommender, sequences = train(users, options, on_epoch)
    quality = measure(recommender, sequences, on_validation=False)
    export(recommender, sequences, model)
    print(
        f"trained in {time.monotonic() - started_s:.0f} s (seed {options.seed}, "
        f"{arguments.threads} thread): HR@10 {quality.hr_at_10:.4f} by the training code; "
        f"model directory {model}"
    )
    return quality


def evaluate_mode(mode: str, model: Path, path: Path) -> evaluate.EvaluateReport:
    """`mtserve evaluate` in this process."""
    options = evaluate.EvaluateOptions(
        model=str(model),
        data=str(path),
        cache=mode,
        min_count=MIN_COUNT,
        device_pages=DEVICE_PAGES,
        page_size=PAGE_SIZE,
        chunk_size=CHUNK_SIZE,
        host_bytes=HOST_BYTES,
    )
    with tqdm(desc=f"evaluate, cache {mode}", unit="req") as bar:

        def on_progress(answered: int, total: int) -> None:
            bar.total = total
            bar.update(answered - bar.n)

        return evaluate.run(options, on_progress)


def make_workload(log: InteractionLog, users: list[UserEvents], arguments: Arguments) -> Workload:
    """The last requests of the users with the longest histories, and a warm-up with the history
    that each of them had before."""
    longest = sorted(range(len(users)), key=lambda user: -len(users[user]))[: arguments.users]
    chosen = set(longest)
    requests = [request for request in trace_requests(log, WINDOW_S) if request.user in chosen]
    if not arguments.log_order:
        requests = all_together(requests)
    before, measured = requests[: -arguments.requests], requests[-arguments.requests :]
    active = {request.user for request in measured}
    known = {request.user: request.length for request in before if request.user in active}
    return Workload(
        warm_up=[user_request(users[user], length) for user, length in known.items()],
        measured=[user_request(users[user], length) for user, length, _ in measured],
    )


def all_together(requests: list[TraceRequest]) -> list[TraceRequest]:
    """The same requests in a random order that keeps every user's own order."""
    order = np.random.default_rng(SEED).permutation([request.user for request in requests])
    waiting: dict[int, deque[TraceRequest]] = defaultdict(deque)
    for request in requests:
        waiting[request.user].append(request)
    return [waiting[user].popleft() for user in order.tolist()]


def user_request(user: UserEvents, length: int) -> UserRequest:
    return UserRequest(user.user_id, user.items[:length].tolist())


def replay_modes(model: Path, workload: Workload, arguments: Arguments) -> dict[str, Replayed]:
    """One server for each cache mode, warmed up; then the measured requests in blocks, every block
    to each server in turn, so that whatever else the machine does meets all modes alike."""
    replayed = {mode: Replayed() for mode in MODES}
    with contextlib.ExitStack() as servers:
        ports: dict[str, int] = {}
        for mode in tqdm(MODES, desc="start servers", unit="server"):
            ports[mode] = servers.enter_context(
                serving(model, server_config(mode), DEFAULT_CACHE / f"server-{mode}")
            )
        for mode, port in ports.items():
            count = len(workload.warm_up)
            with tqdm(total=count, desc=f"warm up, cache {mode}", unit="req") as bar:
                replay(port, workload.warm_up, arguments.workers, bar.update)
        blocks = [
            workload.measured[start : start + BLOCK]
            for start in range(0, len(workload.measured), BLOCK)
        ]
        total = len(MODES) * len(workload.measured)
        with tqdm(total=total, desc="replay, all modes in turn", unit="req") as bar:
            for number, block in enumerate(blocks):
                for turn in range(len(MODES)):
                    mode = MODES[(number + turn) % len(MODES)]
                    answers = replay(ports[mode], block, arguments.workers, bar.update)
                    replayed[mode].extend(answers)
    return replayed


def server_config(mode: str) -> EngineConfig:
    """One thread a step: the model is small, and two more processes want the other core."""
    cache = CacheConfig(
        tiers=mode,
        device_pages=DEVICE_PAGES,
        page_size=PAGE_SIZE,
        chunk_size=CHUNK_SIZE,
        host_bytes=HOST_BYTES,
    )
    return EngineConfig(cache=cache, threads=1)


def print_report(
    trained: Quality,
    evaluated: dict[str, evaluate.EvaluateReport],
    replayed: dict[str, Replayed],
    arguments: Arguments,
) -> None:
    order = "in the log's order" if arguments.log_order else "mixed"
    mean = replayed["off"].history / len(replayed["off"].answers)
    print()
    print(
        f"{evaluated['off'].num_users} users ranked over the whole catalogue through the engine; "
        f"{len(replayed['off'].answers)} requests of {arguments.users} of them, {mean:.0f} events "
        f"each on average, sent to the server ({order}, {arguments.workers} connections)"
    )
    titles = ("HR@10", "NDCG@10", "hits", "device", "host", "computed", "p50 ms", "p99 ms", "req/s")
    header = f"{'cache':7}" + "".join(f"{title:>9}" for title in titles) + "  speed-up"
    print(header)
    print("-" * len(header))
    recomputed = replayed["off"]
    for mode in MODES:
        quality, answers = evaluated[mode], replayed[mode]
        p50, p99 = 1e3 * np.percentile(answers.latencies_s, [50, 99])
        device, host = answers.device / answers.history, answers.host / answers.history
        print(
            f"{mode:7}{quality.hr_at_10:9.4f}{quality.ndcg_at_10:9.4f}{quality.num_hits:9d}"
            f"{device:9.1%}{host:9.1%}{1 - device - host:9.1%}{p50:9.2f}{p99:9.2f}"
            f"{len(answers.answers) / answers.duration_s:9.0f}"
            f"{recomputed.duration_s / answers.duration_s:9.2f}x"
        )
    tiered = replayed["tiered"]
    medians = [float(np.median(mode.latencies_s)) for mode in (recomputed, tiered)]
    same = sum(a == b for a, b in zip(recomputed.answers, tiered.answers, strict=True))
    print(
        "hits: users whose held-out film is among the first ten (the training code itself found "
        f"{trained.num_hits}).\n"
        "device, host, computed: where the history tokens of the replay came from.\n"
        "speed-up: requests per second over recomputing (cache off), same requests, this run.\n"
        f"Tiered against recomputing: {recomputed.duration_s / tiered.duration_s:.2f} x the "
        f"requests per second, {medians[0] / medians[1]:.2f} x faster at the median; "
        f"{same} of {len(tiered.answers)} answers equal in every bit."
    )


def check(
    trained: Quality,
    evaluated: dict[str, evaluate.EvaluateReport],
    replayed: dict[str, Replayed],
) -> None:
    """The promise: a cache changes no answer. Ends the program with an error if it did."""
    hits = {mode: report.num_hits for mode, report in evaluated.items()}
    if len(set(hits.values())) != 1:
        raise SystemExit(f"the hits differ between cache modes: {hits}")
    if abs(hits["off"] - trained.num_hits) > 2:
        raise SystemExit(
            f"the engine found {hits['off']} hits, the training code {trained.num_hits}"
        )
    for mode in MODES[1:]:
        pairs = zip(replayed["off"].answers, replayed[mode].answers, strict=True)
        for recomputed, cached in pairs:
            if recomputed.items != cached.items or not np.allclose(
                recomputed.scores, cached.scores, rtol=0, atol=TOLERANCE
            ):
                raise SystemExit(f"cache {mode} answered {cached}, recomputed: {recomputed}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
