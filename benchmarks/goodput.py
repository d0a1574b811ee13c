"""Goodput: the highest rate of requests that a server answers within 100 ms (P99), without errors.

    .venv/bin/python -m benchmarks.goodput [--seconds 20] [--output FILE]

Three servers of one model with random weights, one after another: `plain` (PyTorch and FastAPI, no
user state: `baselines/plain_server.py`), `recompute` (this server with the cache off) and `tiered`
(device pool for half of the users, the rest in host memory). Their answers are compared first.

This process is the client. Users have histories of about 2K events that grow from request to
request, come back by a Zipf-like law, and one request in 200 is of a user never seen. Arrivals are
Poisson, whatever the server does. A probe of a rate fails when more than 1 % of its requests are
late or one fails; a rate fails when `--tries` probes do. Rates double until one fails; then the
interval is halved until it is narrower than `--resolution`. Before each probe every user that the
tiered server has not seen sends one request that does not count. With `--repeats` the servers take
turns and the best goodput of each counts: what else the machine does can only lower it.

`closed_loop_per_s` is for comparison: answers a second with four requests always under way,
whatever their latency. A ratio of goodputs far above the ratio of these says that the machine was
not quiet: a P99 of few requests is the first thing that disturbances take away.

Exit status 1 when answers differ, or `tiered` has less than 5 times the goodput of `plain`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import ceilings
from benchmarks.goodput_load import LoadShape, Population, scores_of
from benchmarks.goodput_servers import Server, model_config, running, servers
from benchmarks.open_loop import Answer, Due, OpenLoop, Stop
from benchmarks.provenance import write_result
from benchmarks.timing import rounded
from engine.models.linear import has_prepacked
from engine.testing.models import save_random_model

OBJECTIVE_S = 0.1
LATE_SHARE = 0.01
LIMIT = 5.0
LOWEST_RATE = 1.0
CLOSED_LOOP_CONNECTIONS = 4
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
NUM_ITEMS = 10_000


class Plan(NamedTuple):
    """How a goodput is looked for."""

    first_rate: float
    seconds: float
    min_requests: int
    resolution: float
    tries: int


class Probe(NamedTuple):
    """One load at one rate. Latencies are of the answers that came."""

    rate: float
    requests: int
    answered: int
    late: int
    failed: int
    p50_ms: float
    p99_ms: float
    passed: bool
    found_share: float | None


def probe(port: int, population: Population, rate: float, plan: Plan, *, warms_up: bool) -> Probe:
    """One load at that rate, after the users that the server does not know yet."""
    unknown = population.renew()
    if warms_up:
        send_all(port, unknown)
    count = max(plan.min_requests, int(rate * plan.seconds))
    max_late = int(LATE_SHARE * count)
    outcome = OpenLoop(port, population.arrivals(rate, count)).run(Stop(OBJECTIVE_S, max_late))
    answers = outcome.answers
    good = [answer for answer in answers if answer.status == 200]
    late = sum(answer.latency_s > OBJECTIVE_S for answer in good)
    low, high = np.percentile([one.latency_s for one in good], (50, 99)) if good else (0.0, 0.0)
    failed = len(answers) - len(good)
    return Probe(
        rate=rounded(rate),
        requests=count,
        answered=len(good),
        late=late,
        failed=failed,
        p50_ms=rounded(1e3 * low),
        p99_ms=rounded(1e3 * high),
        passed=not outcome.gave_up and failed == 0 and late <= max_late,
        found_share=_found_share(good),
    )


def send_all(port: int, dues: list[Due], connections: int = 2) -> list[Answer]:
    """So many at a time, whatever they take. Raises RuntimeError when one fails."""
    answers = OpenLoop(port, dues, max_connections=connections).run().answers
    for answer in answers:
        if answer.status != 200:
            raise RuntimeError(f"a request failed with {answer.status}: {answer.body[:300]!r}")
    return sorted(answers)


def _found_share(answers: list[Answer]) -> float | None:
    """Share of history tokens that were found in a tier, if the server says so."""
    usages = [json.loads(answer.body).get("usage") for answer in answers]
    if not usages or usages[0] is None:
        return None
    total = sum(usage["history_length"] for usage in usages)
    found = sum(usage["device_tokens"] + usage["host_tokens"] for usage in usages)
    return rounded(found / total)


def goodput(measure: Callable[[float], Probe], plan: Plan) -> tuple[float, list[Probe]]:
    """(highest rate that passed, all probes); 0.0 when not even the lowest rate passes."""
    probes: list[Probe] = []

    def passes(rate: float) -> bool:
        for _ in range(plan.tries):
            probes.append(measure(rate))
            print(f"  {probes[-1]}", file=sys.stderr, flush=True)
            if probes[-1].passed:
                return True
        return False

    low, high = 0.0, plan.first_rate
    while passes(high):
        low, high = high, 2 * high
    while low == 0.0 and high > LOWEST_RATE:
        if passes(high / 2):
            low = high / 2
        else:
            high /= 2
    while low and high / low > 1 + plan.resolution:
        middle = (low * high) ** 0.5
        if passes(middle):
            low = middle
        else:
            high = middle
    return rounded(low), probes


def closed_loop(
    port: int, population: Population, plan: Plan, rate: float, *, warms_up: bool
) -> float:
    """Answers a second with four requests under way, over as many as a probe at that rate has."""
    unknown = population.renew()
    if warms_up:
        send_all(port, unknown)
    count = max(plan.min_requests, int(rate * plan.seconds))
    dues = [due._replace(at_s=0.0) for due in population.arrivals(1.0, count)]
    began_s = time.perf_counter()
    send_all(port, dues, CLOSED_LOOP_CONNECTIONS)
    return rounded(count / (time.perf_counter() - began_s))


def first_answers(port: int, shape: LoadShape) -> list[np.ndarray]:
    """Scores of a few users' requests, the same for every server."""
    few = shape._replace(num_users=4)
    return [scores_of(answer.body) for answer in send_all(port, Population(few, seed=1).renew())]


def relative_error(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Root mean square of the difference over that of the expected scores."""
    one, other = np.concatenate(found), np.concatenate(expected)
    return float(np.sqrt(np.mean((one - other) ** 2) / np.mean(other**2)))


class Run(NamedTuple):
    """One server from start to end. scores: of the first answers."""

    goodput_per_s: float
    closed_loop_per_s: float
    probes: list[Probe]
    scores: list[np.ndarray]
    jitter: dict[str, object]
    description: Any


def run_server(server: Server, folder: Path, shape: LoadShape, plan: Plan) -> Run:
    """Start the server and find its goodput. Its users stay the same from probe to probe."""
    print(server.name, file=sys.stderr, flush=True)
    population = Population(shape, seed=0)
    warms_up = server.name == "tiered"
    jitter = ceilings.jitter()
    with running(server, folder) as (port, description):
        scores = first_answers(port, shape)
        rate, probes = goodput(
            lambda rate: probe(port, population, rate, plan, warms_up=warms_up), plan
        )
        closed = closed_loop(port, population, plan, rate, warms_up=warms_up)
    return Run(rate, closed, probes, scores, jitter, description)


def measure(options: argparse.Namespace, shape: LoadShape, plan: Plan) -> dict[str, Any]:
    """All servers in turn, `--repeats` times; the best goodput of each counts."""
    runs: dict[str, list[Run]] = {name: [] for name in options.servers}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_random_model(folder / "model", model_config(options, shape))
        chosen = [one for one in servers(options, shape, folder) if one.name in options.servers]
        for server in chosen * options.repeats:
            known = [run.goodput_per_s for run in runs[server.name] if run.goodput_per_s]
            first_rate = max(known, default=plan.first_rate)
            run = run_server(server, folder, shape, plan._replace(first_rate=first_rate))
            runs[server.name].append(run)
    expected = runs[chosen[0].name][0].scores
    return {name: _report(of_server, expected) for name, of_server in runs.items()}


def _report(runs: list[Run], expected: list[np.ndarray]) -> dict[str, Any]:
    error = max(relative_error(run.scores, expected) for run in runs)
    return {
        "goodput_per_s": max(run.goodput_per_s for run in runs),
        "closed_loop_per_s": max(run.closed_loop_per_s for run in runs),
        "scores_relative_error": rounded(error, 2),
        "runs": [
            {
                "goodput_per_s": run.goodput_per_s,
                "closed_loop_per_s": run.closed_loop_per_s,
                "jitter": run.jitter,
                "description": run.description,
                "probes": [one._asdict() for one in run.probes],
            }
            for run in runs
        ],
    }


def missed_limits(results: dict[str, Any], dtype: str) -> list[str]:
    """What is wrong, one line each."""
    missed = [
        f"{name}: scores differ from the first server's by {result['scores_relative_error']}"
        for name, result in results.items()
        if result["scores_relative_error"] > TOLERANCE[dtype]
    ]
    rates = {name: result["goodput_per_s"] for name, result in results.items()}
    plain, tiered = rates.get("plain"), rates.get("tiered")
    if plain == 0.0:
        missed.append("plain answers no rate in time: compare with a smaller model")
    elif plain is not None and tiered is not None and tiered < LIMIT * plain:
        missed.append(f"tiered serves {tiered} a second, less than {LIMIT} times plain's {plain}")
    return missed


def ratios(results: dict[str, Any], field: str) -> dict[str, float | None]:
    """Rates over plain's, and tiered's over recompute's; None where the divisor is 0."""
    rates = {name: result[field] for name, result in results.items()}
    pairs = (("tiered", "plain"), ("recompute", "plain"), ("tiered", "recompute"))
    return {
        f"{one}_over_{other}": rounded(rates[one] / rates[other], 3) if rates[other] else None
        for one, other in pairs
        if one in rates and other in rates
    }


def options_of(arguments: list[str]) -> argparse.Namespace:
    fast = "bfloat16" if has_prepacked(torch.bfloat16) else "float32"
    names = ["plain", "recompute", "tiered"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--servers", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default=fast,
        help="of the model; what is fast on this machine when not given",
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--users", type=int, default=128)
    parser.add_argument("--history", type=int, default=2048)
    parser.add_argument("--max-new", type=int, default=8, help="new events of a request: 1 to this")
    parser.add_argument("--candidates", type=int, nargs=2, default=(100, 256))
    parser.add_argument("--zipf", type=float, default=0.8)
    parser.add_argument("--new-user-share", type=float, default=0.005)
    parser.add_argument("--threads", type=int, default=0, help="of our engine's steps; 0: torch's")
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--max-batch-tokens", type=int, default=4096)
    parser.add_argument("--max-piece-tokens", type=int, default=0)
    parser.add_argument("--plain-max-batch", type=int, default=8)
    parser.add_argument("--first-rate", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a probe")
    parser.add_argument("--min-requests", type=int, default=200, help="of a probe")
    parser.add_argument("--resolution", type=float, default=0.08)
    parser.add_argument("--tries", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1, help="of all servers in turn")
    parser.add_argument("--output", help="write the result, with provenance, to this file")
    return parser.parse_args(arguments)  # fmt: skip


def main() -> int:
    options = options_of(sys.argv[1:])
    shape = LoadShape(
        options.users, options.history, options.max_new, tuple(options.candidates), options.zipf,
        options.new_user_share, NUM_ITEMS,
    )  # fmt: skip
    plan = Plan(
        options.first_rate, options.seconds, options.min_requests, options.resolution,
        options.tries,
    )  # fmt: skip
    results = measure(options, shape, plan)
    missed = missed_limits(results, options.dtype)
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    write_result(
        options.output,
        {
            "config": {**settings, "cores": len(os.sched_getaffinity(0))},
            "objective": {"p99_ms": 1e3 * OBJECTIVE_S, "failures": 0},
            "servers": results,
            "ratios": ratios(results, "goodput_per_s"),
            "closed_loop_ratios": ratios(results, "closed_loop_per_s"),
            "limits": {"tiered_over_plain": LIMIT, "scores_relative_error": TOLERANCE},
            "missed": missed,
        },
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
