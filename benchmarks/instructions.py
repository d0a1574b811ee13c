"""A gate on instruction counts: fixed small jobs under callgrind, against the committed counts.

    .venv/bin/python -m benchmarks.instructions [--jobs planning_hit ...] [--update]

Seconds on a shared machine say little about a change of a few per cent; instructions do. The jobs
(`instruction_jobs.py`) run in one thread under valgrind, which has no AVX-512, so ENGINE_CPU_ISA is
avx2. Counted is a whole call from Python: the kernel and what leads to it. Takes about a minute a
job; needs valgrind with its headers, and a C compiler.

Exit status 1 when a count is more than 2 % above its line in `instruction_counts.json`, or more
than 2 % below it (then the file is out of date). `--update` rewrites the lines of the jobs run.
Counts depend on the versions of the compiler, Python and libraries, which the file names.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.instruction_jobs import JOBS

COUNTS_FILE = Path(__file__).with_name("instruction_counts.json")
TOLERANCE = 0.02
_ROOT = Path(__file__).resolve().parents[1]
_TOTALS = re.compile(r"^totals: (\d+)", re.MULTILINE)
_JOB_TIMEOUT_S = 900.0


def versions() -> dict[str, str]:
    """What the counts depend on, besides our code."""
    return {
        "compiler": _first_line(os.environ.get("CXX", "c++"), "--version"),
        "valgrind": _first_line("valgrind", "--version"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def count(name: str, folder: Path, library: Path) -> int:
    """Instructions of the job: the least of its runs. Raises RuntimeError when it fails."""
    dump = folder / name
    command = [
        "valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={dump}",
        sys.executable, "-m", "benchmarks.instruction_jobs", name, str(library),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "ENGINE_CPU_ISA": "avx2",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    done = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_JOB_TIMEOUT_S
    )
    counts = [
        int(found[1])
        for file in folder.glob(f"{name}.*")
        if (found := _TOTALS.search(file.read_text()))
    ]
    if done.returncode or not counts:
        raise RuntimeError(f"{name} failed under valgrind: {done.stderr[-2000:]}")
    return min(counts)


def build_library(folder: Path) -> Path:
    """The client requests, compiled. Raises RuntimeError without valgrind's headers."""
    source, path = Path(__file__).with_name("callgrind.c"), folder / "callgrind.so"
    command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", str(source), "-o", str(path)]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        raise RuntimeError(f"{source.name} does not compile: {built.stderr}")
    return path


def differences(counts: dict[str, int], committed: dict[str, int]) -> list[str]:
    """What is off by more than the tolerance, one line each."""
    lines = []
    for name, found in counts.items():
        expected = committed.get(name)
        if expected is None:
            lines.append(f"{name}: {found} instructions, and no committed count: run --update")
        elif abs(found - expected) > TOLERANCE * expected:
            lines.append(f"{name}: {found} instructions, {found / expected - 1:+.1%}")
    return lines


def _first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", nargs="+", choices=sorted(JOBS), default=list(JOBS))
    parser.add_argument("--update", action="store_true", help="write the counts to the file")
    options = parser.parse_args()
    committed: dict[str, Any] = {"versions": {}, "counts": {}}
    if COUNTS_FILE.exists():
        committed = json.loads(COUNTS_FILE.read_text())
    counts = {}
    with tempfile.TemporaryDirectory() as name:
        library = build_library(Path(name))
        for job in options.jobs:
            counts[job] = count(job, Path(name), library)
            print(f"{job}: {counts[job]}", flush=True)
    if options.update:
        merged = {"versions": versions(), "counts": {**committed["counts"], **counts}}
        COUNTS_FILE.write_text(json.dumps(merged, indent=2) + "\n")
        return 0
    found = differences(counts, committed["counts"])
    for line in found:
        print(line, file=sys.stderr)
    if found and versions() != committed["versions"]:
        print(f"counted with {versions()}, the file with {committed['versions']}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
