"""After everything that bad clients do, the pools are whole and a probe is answered.

Small by default. `ABUSE_CONNECTIONS`, `ABUSE_BODY_BYTES` and `ABUSE_CLIENTS` set the sizes;
times are measured by `benchmarks/abuse.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from benchmarks import abuse_scenarios as abuse
from tests.integration.server_process import ServerProcess

SIZES = abuse.Sizes(
    connections=int(os.environ.get("ABUSE_CONNECTIONS", "2000")),
    body_bytes=int(os.environ.get("ABUSE_BODY_BYTES", "1000000000")),
    clients=int(os.environ.get("ABUSE_CLIENTS", "8")),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[abuse.Target]:
    flags = [
        "--device-pages", "512", "--page-size", "16", "--chunk-size", "64",
        "--host-bytes", "67108864", "--threads", "1", "--check-invariants",
        "--max-body-bytes", str(abuse.MAX_BODY_BYTES), "--header-timeout-s", "1",
        "--send-timeout-s", "1",
    ]  # fmt: skip
    with ServerProcess(tmp_path_factory.mktemp("server"), *flags) as server:
        server.until_ready()
        yield abuse.Target(server.port, server.process.pid)
        assert server.process.poll() is None, server.log
        assert "Traceback" not in server.log


@pytest.mark.parametrize("name", abuse.SCENARIOS)
def test_the_server_is_as_before_after(target: abuse.Target, name: str) -> None:
    abuse.SCENARIOS[name](target, SIZES)
    abuse.settled(target)
    abuse.probe(target, 0)


def test_idle_connections_do_not_keep_others_out(target: abuse.Target) -> None:
    with abuse.idle_connections(target, SIZES.connections):
        abuse.probe(target, 0)
    abuse.settled(target)
