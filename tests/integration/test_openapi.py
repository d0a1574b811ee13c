"""The OpenAPI document and the server that it describes.

`SCHEMATHESIS_EXAMPLES` sets how many requests are made up per route (default 5).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.server_process import ServerProcess

EXAMPLES = os.environ.get("SCHEMATHESIS_EXAMPLES", "5")
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    flags = ["--device-pages", "256", "--page-size", "16", "--chunk-size", "64",
             "--host-bytes", "67108864", "--threads", "1"]  # fmt: skip
    with ServerProcess(folder, *flags) as running:
        yield running.until_ready()


def test_made_up_requests_are_answered_as_the_document_says(
    server: ServerProcess, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "run",
            f"http://{server.address}/openapi.json", "--checks", CHECKS,
            "--phases", "examples,coverage,fuzzing", "--max-examples", EXAMPLES,
            "--generation-database", "none", "--request-timeout", "60", "--no-color",
        ],
        capture_output=True, text=True, cwd=tmp_path, timeout=110 + 10 * int(EXAMPLES),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.get("/v2/health/ready").status == 200
