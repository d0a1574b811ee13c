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
        "command": " ".join(["python", *sys.argv]),
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
