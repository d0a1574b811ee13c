"""Builds of the native code that only tests need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}
COMPILER = os.environ.get("CXX", "c++")


def missing_tool() -> str | None:
    """Why nothing can be built here; None: it can."""
    for tool in (COMPILER, "cmake", "ninja"):
        if shutil.which(tool, path=ENVIRONMENT["PATH"]) is None:
            return f"{tool} is not installed"
    return None


def missing_for_emulation() -> str | None:
    """Why AVX-512 cannot be run in software here; None: it can."""
    reason = missing_tool()
    if reason is not None:
        return reason
    command = [
        COMPILER,
        "-fsyntax-only",
        "-x",
        "c++",
        "-include",
        "simde/x86/avx512.h",
        "/dev/null",
    ]
    if subprocess.run(command, capture_output=True).returncode != 0:
        return "SIMDe (libsimde-dev) is not installed"
    return None


def build_with_emulated_avx512() -> Path:
    """The folder with a native library that runs AVX-512 BF16 in software; built as needed."""
    folder = ROOT / "build" / "emulated_avx512"
    options = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DENGINE_EMULATE_AVX512=ON",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *options],
        ["cmake", "--build", str(folder)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder
