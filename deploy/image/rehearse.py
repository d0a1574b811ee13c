"""Rehearse the image where no container engine runs: its build, its start, its health, its end.

    python deploy/image/rehearse.py [--torch-version 2.13.0]

In a temporary folder: copies what the Dockerfile copies and nothing else, runs the scripts that it
runs, starts its ENTRYPOINT (as another user where this one may), asks its HEALTHCHECK before and
after, ranks once, and ends it with its STOPSIGNAL. Exit status 0 if all of it went as the image
promises. It takes a few minutes and 2 GB: most of it is torch, twice.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
IMAGE_PORT = "8000"
SYSTEM_PATH = "/usr/bin:/bin"
READY_WITHIN_S = 120


class Dockerfile(NamedTuple):
    """What the rehearsal takes from the Dockerfile."""

    copied: list[str]
    torch_version: str
    extras: str
    user: int
    entrypoint: list[str]
    health: list[str]
    stop: signal.Signals

    @classmethod
    def read(cls) -> Dockerfile:
        """Raises ValueError if a line it needs is not there."""
        text = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ")

        def one(pattern: str) -> str:
            found = re.search(pattern, text, re.MULTILINE)
            if found is None:
                raise ValueError(f"deploy/Dockerfile has no line {pattern!r}")
            return found[1]

        copies = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
        return cls(
            copied=[source for line in copies for source in line.split()],
            torch_version=one(r"^ARG TORCH_VERSION=(\S+)"),
            extras=one(r"^ARG EXTRAS=(\S+)"),
            user=int(one(r"^USER (\d+)")),
            entrypoint=json.loads(one(r"^ENTRYPOINT (\[.*\])$")),
            health=json.loads(one(r"^HEALTHCHECK .*CMD (\[.*\])$")),
            stop=signal.Signals[one(r"^STOPSIGNAL (\w+)$")],
        )


def build(image: Dockerfile, folder: Path, torch_version: str) -> Path:
    """The stages `build` and `install`; the folder of the installed programs."""
    source, dist, target = folder / "src", folder / "dist", folder / "mtserve"
    for name in image.copied:
        original, copy = ROOT / name, source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if original.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(original, copy, ignore=ignored)
        else:
            shutil.copy(original, copy)
    # The system's Python, as in the image: the server's other user may not reach one in a home.
    environment = {
        **os.environ,
        "PATH": SYSTEM_PATH,
        "TORCH_VERSION": torch_version,
        "EXTRAS": image.extras,
    }
    scripts = source / "deploy/image"
    for command in (
        [scripts / "torch", folder / "build"],
        [scripts / "wheel", folder / "build", source, dist],
        [scripts / "torch", target],
        [scripts / "install", target, dist],
    ):
        print("==", command[0].name, *command[1:], flush=True)
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    for library in ("_engine_cpu.so", "_engine_hash.so"):
        if not list(target.rglob(f"engine/{library}")):
            raise SystemExit(f"the wheel has no {library}")
    return target / "bin"


@contextmanager
def running(command: list[str], programs: Path, user: int) -> Iterator[subprocess.Popen[bytes]]:
    """The server, with no home, no rights beyond reading, and none of this environment."""
    is_root = os.geteuid() == 0
    process = subprocess.Popen(
        command,
        cwd="/",
        env={"PATH": f"{programs}:{SYSTEM_PATH}", "PYTHONDONTWRITEBYTECODE": "1"},
        user=user if is_root else None,
        group=user if is_root else None,
        extra_groups=[] if is_root else None,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def try_image(image: Dockerfile, programs: Path) -> None:
    """Start, health, one answer, end. Raises SystemExit when one is not as promised."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [shutil.which(image.entrypoint[0], path=str(programs)) or "", *image.entrypoint[1:]]
    command += ["--host", "127.0.0.1", "--port", port]  # later flags win, as in `docker run`
    health = [str(programs / image.health[0])]
    health += [argument.replace(IMAGE_PORT, port) for argument in image.health[1:]]

    def is_healthy() -> bool:
        return subprocess.run(health, stderr=subprocess.DEVNULL).returncode == 0

    check(not is_healthy(), "the health check fails while nothing runs")
    with running(command, programs, image.user) as process:
        wait_for(is_healthy, process, "the health check passes")
        wait_for(lambda: ask(port, "GET", "/v2/health/ready") == 200, process, "ready")
        body = json.dumps({"user_id": "u1", "history": [1, 2, 3], "candidates": [4, 5]})
        check(ask(port, "POST", "/v1/rank", body) == 200, "a rank request is answered")
        process.send_signal(image.stop)
        check(process.wait(60) == 0, f"{image.stop.name} ends it with status 0")
    check(not is_healthy(), "the health check fails afterwards")


def ask(port: str, method: str, path: str, body: str | None = None) -> int:
    """The status of one request; 0 when nothing listens."""
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    try:
        connection.request(method, path, body)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    """Poll until it holds. Raises SystemExit after READY_WITHIN_S or when the process ends."""
    deadline_s = time.monotonic() + READY_WITHIN_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"not so: {what}")
        time.sleep(0.1)
    print("ok:", what, flush=True)


def check(holds: bool, what: str) -> None:
    """Say it, or end with it."""
    if not holds:
        raise SystemExit(f"not so: {what}")
    print("ok:", what, flush=True)


def main() -> int:
    image = Dockerfile.read()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-version", default=image.torch_version)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mtserve-image-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server's user must reach what is installed here
        try_image(image, build(image, folder, options.torch_version))
    return 0


if __name__ == "__main__":
    sys.exit(main())
