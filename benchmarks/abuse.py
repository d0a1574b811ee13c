"""What bad clients cost good ones: a probe's time after and during each scenario.

    python -m benchmarks.abuse [--connections 10000] [--body-bytes 1000000000] [--output FILE]

Starts a server with the built-in model and bookkeeping checks, runs each scenario of
`abuse_scenarios.py` against it, waits until the engine is idle and then sends probes (a small rank
request on a connection of its own). The first probe after each scenario counts like every other.
Exit status 1 if a scenario fails or a probe takes longer than 100 ms.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import abuse_scenarios as abuse
from benchmarks.provenance import write_result

LIMIT_MS = 100.0
SERVER = [
    "--port", "0", "--threads", "1", "--device-pages", "512", "--page-size", "16",
    "--chunk-size", "64", "--host-bytes", str(64 << 20), "--check-invariants",
    "--max-body-bytes", str(abuse.MAX_BODY_BYTES), "--access-log-format", "off",
    "--header-timeout-s", "5", "--send-timeout-s", "3",
]  # fmt: skip


@contextmanager
def server() -> Iterator[abuse.Target]:
    """A server that is ready; it must end well when told to."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.entrypoints.api_server", *SERVER], stderr=log
        )
        try:
            yield _ready(process, log)
            process.terminate()
            assert process.wait(60) == 0, "the server did not end well"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _ready(process: subprocess.Popen[bytes], log: Any) -> abuse.Target:
    found = None
    while b"ready: model" not in (text := _read(log)):
        assert process.poll() is None, text.decode()
        time.sleep(0.05)
    found = re.search(rb"listening on http://127\.0\.0\.1:(\d+)", text)
    assert found is not None
    return abuse.Target(int(found[1]), process.pid)


def _read(log: Any) -> bytes:
    log.seek(0)
    text: bytes = log.read()
    log.seek(0, 2)
    return text


def probes(target: abuse.Target, count: int) -> dict[str, float]:
    """First, median and slowest of some probes in a row, in milliseconds."""
    times = [abuse.probe(target, number) for number in range(count)]
    ordered = sorted(times)
    return {
        "first_ms": round(times[0], 2),
        "p50_ms": round(ordered[count // 2], 2),
        "max_ms": round(ordered[-1], 2),
    }


def measure(sizes: abuse.Sizes, num_probes: int) -> dict[str, Any]:
    """All scenarios against one server."""
    with server() as target:
        probes(target, num_probes)
        results: dict[str, Any] = {"before": {"probes": probes(target, num_probes)}}
        results["before"]["resident_mib"] = abuse.resident_bytes(target.pid) >> 20
        for name, scenario in abuse.SCENARIOS.items():
            began_s = time.perf_counter()
            scenario(target, sizes)
            took_s = time.perf_counter() - began_s
            abuse.settled(target)
            results[name] = {
                "took_s": round(took_s, 1),
                "probes": probes(target, num_probes),
                "resident_mib": abuse.resident_bytes(target.pid) >> 20,
            }
            print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
        with abuse.idle_connections(target, sizes.connections):
            results["during_idle_connections"] = {
                "probes": probes(target, num_probes),
                "resident_mib": abuse.resident_bytes(target.pid) >> 20,
            }
        abuse.settled(target)
        results["after_idle_connections"] = {"probes": probes(target, num_probes)}
        return results


def main() -> int:
    """Measure and write; the exit status."""
    parser = argparse.ArgumentParser(description="What bad clients cost good ones.")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--body-bytes", type=int, default=1_000_000_000)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--probes", type=int, default=50)
    parser.add_argument("--output", help="write the result, with provenance, to this file")
    options = parser.parse_args()
    sizes = abuse.Sizes(options.connections, options.body_bytes, options.clients)
    results = measure(sizes, options.probes)
    slowest_ms = max(result["probes"]["max_ms"] for result in results.values())
    write_result(
        options.output,
        {
            "config": {**sizes._asdict(), "probes": options.probes, "server": SERVER},
            "scenarios": results,
            "limit_ms": LIMIT_MS,
            "slowest_probe_ms": slowest_ms,
            "is_within_limit": slowest_ms <= LIMIT_MS,
        },
    )
    return 0 if slowest_ms <= LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
