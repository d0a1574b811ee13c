"""A long run of random wire inputs, and what it does to the memory of the process.

    PYTHONPATH=.:tests/support python -m tests.fuzz.long_run [--seed N] [--output FILE]

Decodes ENGINE_FUZZ_INPUTS (default 1,000,000) random cases, HTTP and gRPC in turn. Fails on the
first one that neither is a request nor a client's error (the seed and the number make it again),
and if resident memory at the end is more than 5 % above that after the first tenth.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path

from tests.fuzz.wire_cases import check_grpc, check_http

MAX_GROWTH = 0.05
TAPE_BYTES = 160


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="write the result, with provenance, to this file")
    options = parser.parse_args()
    count = int(os.environ.get("ENGINE_FUZZ_INPUTS", "1000000"))
    choices = random.Random(options.seed)
    accepted = [0, 0]
    first_rss = 0
    began_s = time.monotonic()
    for number in range(count):
        tape = choices.randbytes(TAPE_BYTES)
        is_grpc = number % 2
        try:
            accepted[is_grpc] += (check_http, check_grpc)[is_grpc](tape)
        except BaseException:
            print(f"input {number} of seed {options.seed}: tape {tape.hex()}", file=sys.stderr)
            raise
        if number == count // 10:
            first_rss = resident_bytes()
    last_rss = resident_bytes()
    from benchmarks.provenance import write_result  # loads torch: not before memory is measured

    growth = last_rss / first_rss - 1
    write_result(
        options.output,
        {
            "seed": options.seed,
            "inputs": count,
            "requests_http": accepted[0],
            "requests_grpc": accepted[1],
            "seconds": round(time.monotonic() - began_s, 1),
            "rss_mib_after_a_tenth": round(first_rss / 2**20, 1),
            "rss_mib_at_the_end": round(last_rss / 2**20, 1),
            "growth": round(growth, 4),
            "max_growth": MAX_GROWTH,
        },
    )
    return 0 if growth <= MAX_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
