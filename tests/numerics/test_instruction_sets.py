"""The native kernels with every instruction set, AVX-512 in software where the machine lacks it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from native_builds import (
    ENVIRONMENT,
    ROOT,
    build_with_emulated_avx512,
    missing_for_emulation,
    missing_tool,
)

from engine.native_library import load_library, machine_isas

MISSING = load_library()
MACHINE_HAS = machine_isas() if MISSING is None else []
NUM_CHECKS = 10 * 11
"""Cases of the reduced list, and checks of a bitwise backend."""
SYMBOL = re.compile(r"^[0-9a-f]+ (\w) (\w+)$", re.MULTILINE)

pytestmark = [pytest.mark.skipif(MISSING is not None, reason=f"native library: {MISSING}")]


def _run(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        # Threads that wait must not keep those from work that share the machine with them.
        env={**os.environ, "ENGINE_CPU_ISA": isa, "OMP_WAIT_POLICY": "PASSIVE"},
        cwd=ROOT,
    )


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512_bf16"])
def test_kernels_conform_with(isa):
    if isa not in MACHINE_HAS:
        pytest.skip(f"this machine lacks {isa}")
    done = _run(isa, "tests/support/isa_conformance.py")
    assert done.stdout == f"{isa}: {NUM_CHECKS} passed\n", done.stderr


@pytest.mark.timeout(300)
@pytest.mark.skipif(missing_for_emulation() is not None, reason=str(missing_for_emulation()))
def test_avx512_kernels_conform_in_software():
    folder = build_with_emulated_avx512()
    done = _run("avx512_bf16", "tests/support/isa_conformance.py", "--library", str(folder))
    assert done.stdout == f"avx512_bf16: {NUM_CHECKS} passed\n", done.stderr


@pytest.mark.timeout(300)
@pytest.mark.skipif(missing_for_emulation() is not None, reason=str(missing_for_emulation()))
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
@pytest.mark.parametrize("isa", ["base", "avx2", "avx512_bf16"])
def test_no_function_can_stand_for_that_of_another_instruction_set(isa):
    """The linker keeps one of the functions that share a name, whatever it was compiled for."""
    folder = build_with_emulated_avx512()
    (compiled,) = folder.rglob(f"kernels_{isa}.cpp.o")
    symbols = subprocess.run(["nm", str(compiled)], check=True, capture_output=True, text=True)
    shared = [name for kind, name in SYMBOL.findall(symbols.stdout) if kind in "uvwVW"]
    own = f"7mtserve{len(isa)}{isa}"
    assert shared
    assert [name for name in shared if own not in name and "mtserve_emulation" not in name] == []


@pytest.mark.timeout(300)
@pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))
def test_native_code_is_clean_under_the_sanitizers():
    done = subprocess.run(
        ["scripts/sanitize", "address"], capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for isa in MACHINE_HAS:
        assert f"{isa}: attention 60, copies 20, time buckets 20\n" in done.stdout


START = """
import engine
from engine.config import AttentionConfig, EngineConfig
from engine.errors import ConfigError
try:
    engine.Engine.from_model_dir(None, EngineConfig(attention=AttentionConfig(backend="{backend}")))
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize("backend", ["auto", "cpu", "torch"])  # the model is native with each
def test_an_unknown_instruction_set_is_an_error_at_the_start(backend):
    done = _run("avx9", "-c", START.format(backend=backend))
    assert done.stdout == (
        "ENGINE_CPU_ISA is avx9: name base, avx2 or avx512_bf16, or unset it\n"
    ), done.stderr


@pytest.mark.skipif("avx512_bf16" in MACHINE_HAS, reason="this machine has every instruction set")
def test_an_instruction_set_that_the_machine_lacks_is_an_error_at_the_start():
    done = _run("avx512_bf16", "-c", START.format(backend="auto"))
    assert done.stdout == (
        "ENGINE_CPU_ISA is avx512_bf16, which this machine lacks: "
        f"its best is {MACHINE_HAS[-1]}; name that, or unset it\n"
    ), done.stderr
