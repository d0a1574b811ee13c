"""The wheel: how long it takes to build, how large it is, and which versions of torch it runs with.

    .venv/bin/python benchmarks/wheel.py --torch 2.10.0 2.11.0 2.13.0 \\
        --output benchmarks/results/wheel.json

The wheel is built without isolation, with the torch of this environment. Each version of torch gets
an environment of its own with nothing else than the wheel and what it requires; there the native
library is loaded and attention backend `cpu` has to conform on a few cases. Fails when the wheel
takes longer or is larger than allowed, holds a path of this machine, or a case fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from provenance import write_result

ROOT = Path(__file__).resolve().parents[1]
MAX_BUILD_SECONDS = 60
MAX_BYTES = 10**6
LIBRARY = "engine/_engine_cpu.so"

CHECK = """
import json
import torch
from engine.native_library import cpu_isa, load_library
from engine.testing.attention import CASES, check_backend
missing = load_library()
assert missing is None, missing
results = check_backend("cpu", cases=[case for case in CASES if case.page_size in (3, 5, 7)])
failed = [str(result) for result in results if not result.passed]
print(json.dumps({
    "torch": torch.__version__, "isa": cpu_isa(), "checks": len(results), "failed": failed,
}))
"""


class Wheel(NamedTuple):
    """A built wheel and the seconds that it took."""

    path: Path
    seconds: float


def build(folder: Path) -> Wheel:
    command = [
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", str(folder), "--config-settings", f"build-dir={folder}/build", str(ROOT),
    ]  # fmt: skip
    start = time.monotonic()
    subprocess.run(command, check=True)
    return Wheel(next(folder.glob("*.whl")), time.monotonic() - start)


def run_with(wheel: Path, version: str, folder: Path) -> dict[str, Any]:
    """What the check says in a fresh environment with that torch."""
    environment = folder / f"torch-{version}"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", f"torch=={version}", str(wheel)]
    subprocess.run(install, check=True)
    done = subprocess.run(
        [python, "-I", "-c", CHECK], check=True, capture_output=True, text=True, cwd=folder
    )
    found: dict[str, Any] = json.loads(done.stdout)
    shutil.rmtree(environment)  # gigabytes, where torch has CUDA
    return found


def machine_paths(library: bytes) -> list[str]:
    """Paths of the machine that built it."""
    folders = {str(ROOT), str(Path.home()), sys.prefix, tempfile.gettempdir() + "/"}
    return sorted(folder for folder in folders if folder.encode() in library)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch", nargs="+", default=["2.13.0"], metavar="VERSION")
    parser.add_argument("--output", help="write the result with its provenance to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        library = zipfile.ZipFile(wheel.path).read(LIBRARY)
        result = {
            "build_seconds": round(wheel.seconds, 1),
            "wheel": wheel.path.name,
            "wheel_bytes": wheel.path.stat().st_size,
            "library_bytes": len(library),
            "machine_paths": machine_paths(library),
            "runs": [run_with(wheel.path, version, folder) for version in options.torch],
        }
    write_result(options.output, result)
    faults = [str(fault) for run in result["runs"] for fault in run["failed"]]
    if result["build_seconds"] > MAX_BUILD_SECONDS:
        faults.append(f"the build took more than {MAX_BUILD_SECONDS} s")
    if result["wheel_bytes"] > MAX_BYTES:
        faults.append(f"the wheel has more than {MAX_BYTES} bytes")
    faults += [f"{LIBRARY} holds {path}" for path in result["machine_paths"]]
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
