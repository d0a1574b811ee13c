"""Where a number comes from: command, commit, machine, versions, date."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch


def provenance() -> dict[str, Any]:
    """Everything a reader needs to run it again."""
    return {
        "command": command_line(),
        "commit": _git("rev-parse", "HEAD"),
        "is_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu_model(), "cores": torch.get_num_threads(), "os": platform.system()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


def command_line() -> str:
    """What was run, as from the repository's root: the script's path names no folder above it."""
    root, script = Path(__file__).resolve().parents[1], Path(sys.argv[0]).resolve()
    if script.is_relative_to(root):
        script = script.relative_to(root)
    return " ".join(["python", str(script), *sys.argv[1:]])


def write_result(path: str | None, result: dict[str, Any]) -> None:
    """Print the result; with a path, also write it with its provenance."""
    print(json.dumps(result, indent=2))
    if path is not None:
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"provenance": provenance(), **result}, indent=2) + "\n")


def _git(*arguments: str) -> str:
    root = Path(__file__).resolve().parent
    finished = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    return finished.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
