"""Nearly valid infer bodies: decoding gives a request or a client's error, nothing else.

ENGINE_FUZZ_INPUTS sets the number of inputs of each test; `tests/fuzz` has longer runs.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.wire_cases import check_grpc, check_http

ROOT = Path(__file__).parents[2]
NUM_INPUTS = int(os.environ.get("ENGINE_FUZZ_INPUTS", "1000"))
tapes = st.binary(max_size=160)


@settings(max_examples=NUM_INPUTS, deadline=None)
@given(tape=tapes)
def test_http_bodies_are_decoded_or_refused(tape: bytes) -> None:
    check_http(tape)


@settings(max_examples=NUM_INPUTS, deadline=None)
@given(tape=tapes)
def test_grpc_messages_are_decoded_or_refused(tape: bytes) -> None:
    check_grpc(tape)


def test_the_cases_are_requests_and_errors_alike() -> None:
    choices = random.Random(0)
    tapes = [choices.randbytes(160) for _ in range(400)]
    for check in (check_http, check_grpc):
        assert 20 < sum(map(check, tapes)) < 380


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.parametrize("decoder", ["http", "grpc"])
def test_the_coverage_guided_fuzzer_runs(decoder: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.atheris_wire", decoder, "-runs=300", "-seed=1"]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
    ended = subprocess.run(
        [*command, f"-artifact_prefix={tmp_path}/"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "Done 300 runs" in ended.stderr
