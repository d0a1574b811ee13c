"""`mtserve replay --server` against a real server: tokens, verification, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_logs import save_model, write_log

from engine.entrypoints import replay_server
from engine.entrypoints.logs import by_user, read_log, trace_requests
from engine.entrypoints.replay_server import ServerReplayOptions
from tests.integration.server_process import ROOT, ServerProcess, eventually


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = tmp_path_factory.mktemp("server")
    flags = "--page-size 4 --chunk-size 8 --device-pages 400 --host-bytes 1000000 --threads 1"
    model = save_model(folder / "model")
    with ServerProcess(folder, "--model", model, *flags.split()) as process:
        yield process.until_ready()


def test_a_log_replayed_one_by_one_computes_every_event_once(
    server: ServerProcess, tmp_path: Path
) -> None:
    log_path = write_log(tmp_path / "log.dat")
    log = read_log(log_path)
    requests = trace_requests(log, 60)

    report = replay_server.run(
        ServerReplayOptions(
            server=f"http://{server.address}", trace=str(log_path), model="small", concurrency=1
        )
    )

    assert (report.requests, report.answered, report.failed) == (len(requests),) * 2 + ({},)
    # The device holds all users, so what one request computed every later one finds there.
    assert report.tokens.history == sum(length for _, length, _ in requests)
    assert report.tokens.computed == sum(map(len, by_user(log))) == log.num_events
    assert report.tokens.device == report.tokens.history - report.tokens.computed
    assert report.device_share == report.tokens.device / report.tokens.history > 0.5


def test_many_at_once_at_a_rate_are_all_answered_and_equal_to_a_recompute(
    server: ServerProcess, tmp_path: Path
) -> None:
    lines = write_log(tmp_path / "log.dat", seed=3).read_text().splitlines()
    log_path = tmp_path / "other_users.dat"
    log_path.write_text("".join(f"other{line}\n" for line in lines))

    report = replay_server.run(
        ServerReplayOptions(
            server=f"http://{server.address}",
            trace=str(log_path),
            concurrency=8,
            rate=400,
            max_requests=120,
            verify=0.5,
        )
    )

    assert (report.requests, report.answered, report.ended) == (120, 120, "log")
    assert report.equal == report.verified > 20


def test_interrupting_the_command_prints_what_there_is(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("quick,1,10\nquick,2,1000\nhold1,1,2000\nhold2,1,2001\nquick,3,3000\n")
    with ServerProcess(tmp_path, fake=True) as server:
        server.until_ready()
        command = [
            sys.executable, "-m", "engine.entrypoints.cli", "replay",
            "--server", f"http://{server.address}", "--trace", str(log), "--concurrency", "2",
        ]  # fmt: skip
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            try:
                eventually(
                    lambda: server.get("/v1/status").body["requests_waiting"] == 2, "two are held"
                )
                process.send_signal(signal.SIGINT)
                output, errors = process.communicate(timeout=60)
            finally:
                process.kill()

        report = json.loads(output)
        assert (process.returncode, errors) == (130, "")
        assert (report["ended"], report["requests"]) == ("interrupted", 4)
        assert (report["answered"], report["unanswered"], report["failed"]) == (2, 2, {})
        assert report["tokens"]["history"] == 3
        eventually(
            lambda: server.get("/v1/status").body["requests_waiting"] == 0,
            "the server has given up what nobody waits for",
        )
