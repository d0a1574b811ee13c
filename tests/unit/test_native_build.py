"""The build without a C++ compiler: it succeeds, installs no library, and says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.skipif(CMAKE is None, reason="cmake is not installed")
def test_a_build_without_a_compiler_installs_nothing_and_says_so(tmp_path):
    assert CMAKE is not None
    build, target = tmp_path / "build", tmp_path / "target"
    environment = {**os.environ, "CXX": "/nonexistent/c++"}
    configured = subprocess.run(
        [CMAKE, "-S", str(ROOT), "-B", str(build)], capture_output=True, text=True, env=environment
    )
    assert configured.returncode == 0, configured.stderr
    assert "No C++ compiler" in configured.stderr
    subprocess.run([CMAKE, "--install", str(build), "--prefix", str(target)], check=True)
    assert list(target.rglob("*.so")) == []
