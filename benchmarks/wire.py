"""What the wire costs: decoding, encoding, HTTP and gRPC, and the way to the core and back.

    .venv/bin/python -m benchmarks.wire [--seconds 5] [--rounds 5] [--output FILE]

The server is the real one; its core is `benchmarks.stub_core`, which answers at once, so no model's
time is in any number. A request has 4096 history ids and 1000 candidates. The server keeps to one
core of the machine, the stub core and the client to another.

- `codec_us`: decoding a body and encoding its answer, in this process, median.
- `latency_us`: one request at a time as its client sees it, median. `overhead_us` is that minus
  the same request handed to the same stub core in this process (`direct_us`).
- `throughput_per_second`: answers of a closed loop over several connections. `server_cpu_us` is the
  time that the server's process was running per answer of it: what other programs do to this
  machine hardly changes it, and a million over it is what one core could answer at most.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.http_load import run_load
from benchmarks.stub_core import CPU_VARIABLE, INFO, StubCore
from engine.entrypoints import oip_http
from engine.entrypoints.protocol import to_json
from engine.request_builder import build_request
from engine.types import Task

ROOT = Path(__file__).resolve().parent.parent
HISTORY, CANDIDATES = 4096, 1000
LIMITS = {"binary_overhead_us": 500.0, "json_overhead_us": 1000.0, "binary_per_second": 3000.0}

_SERVER = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
from engine.entrypoints import api_server, cli
config = cli.serve_config(cli.Arguments(sys.argv[2:], None))
sys.exit(api_server.serve(config, core_module="benchmarks.stub_core"))
"""


class Ids(NamedTuple):
    """One request's ids, int64."""

    history: np.ndarray
    candidates: np.ndarray


class Body(NamedTuple):
    """An infer body; `header_length` is its header's value if it has binary tensors."""

    content: bytes
    header_length: str | None


class Running(NamedTuple):
    """A server's ports and process."""

    http: int
    grpc: int
    pid: int

    def cpu_s(self) -> float:
        """Seconds that its threads have run."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) / 1e9


def random_ids() -> Ids:
    numbers = np.random.default_rng(0)
    return Ids(
        numbers.integers(0, 10**7, HISTORY, np.int64),
        numbers.integers(0, 10**7, CANDIDATES, np.int64),
    )


def json_body(ids: Ids) -> Body:
    return Body(
        to_json(
            {
                "inputs": [
                    {"name": "user_id", "datatype": "BYTES", "shape": [1], "data": ["user-1"]},
                    _with_data("history", ids.history),
                    _with_data("candidates", ids.candidates),
                ]
            }
        ),
        None,
    )


def _with_data(name: str, values: np.ndarray) -> dict[str, Any]:
    return {
        "name": name, "datatype": "INT64", "shape": list(values.shape), "data": values.tolist(),
    }  # fmt: skip


def binary_body(ids: Ids) -> Body:
    user = struct.pack("<I", 6) + b"user-1"
    tails = [user, ids.history.tobytes(), ids.candidates.tobytes()]
    described = (("user_id", "BYTES", 1), ("history", "INT64", HISTORY),
                 ("candidates", "INT64", CANDIDATES))  # fmt: skip
    inputs = [
        {"name": name, "datatype": datatype, "shape": [count],
         "parameters": {"binary_data_size": len(tail)}}
        for (name, datatype, count), tail in zip(described, tails, strict=True)
    ]  # fmt: skip
    content = to_json({"inputs": inputs, "parameters": {"binary_data_output": True}})
    return Body(b"".join((content, *tails)), str(len(content)))


def http_request(body: Body) -> bytes:
    """The request's bytes. A fixed request id keeps all answers equally long."""
    lines = [
        f"POST /v2/models/{INFO.name}/infer HTTP/1.1",
        "host: 127.0.0.1",
        "x-request-id: bench",
        f"content-length: {len(body.content)}",
    ]
    if body.header_length is not None:
        lines.append(f"inference-header-content-length: {body.header_length}")
    return "\r\n".join([*lines, "", ""]).encode() + body.content


@contextlib.contextmanager
def server(server_cpu: int, core_cpu: int, *flags: str) -> Iterator[Running]:
    """A server over the stub core, with what it logs thrown away in the end."""
    with tempfile.TemporaryFile("w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(server_cpu), "--port", "0", "--grpc-port", "0",
             *flags],
            stderr=log, stdout=subprocess.DEVNULL, cwd=ROOT,
            env={**os.environ, CPU_VARIABLE: str(core_cpu)},
        )  # fmt: skip
        try:
            yield _wait_ready(process, log.fileno())
        finally:
            process.terminate()
            process.wait(30)


def _wait_ready(process: subprocess.Popen[bytes], log: int) -> Running:
    for _ in range(600):
        text = os.pread(log, 1 << 16, 0).decode()
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended: {text}")
        ports = [re.search(rf"listening on {kind}://\S+:(\d+)", text) for kind in ("http", "grpc")]
        if " ready: " in text and ports[0] and ports[1]:
            return Running(int(ports[0][1]), int(ports[1][1]), process.pid)
        time.sleep(0.05)
    raise RuntimeError("the server is not ready after 30 s")


def median_us(work: Callable[[], object], repeats: int = 500) -> float:
    """Median microseconds of a call."""
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return round(statistics.median(times) * 1e6, 1)


def direct_us(ids: Ids) -> float:
    """The same request handed to a stub core in this process."""
    core = StubCore()

    def rank() -> None:
        core.submit(
            build_request(
                task=Task.RANK, user_id="user-1", history=ids.history, candidates=ids.candidates
            )
        )
        core.step()
        core.take_outbox()

    return median_us(rank)


def codec_us(body: Body) -> dict[str, float]:
    """Decoding the body and encoding its answer."""

    def decode() -> Any:
        return oip_http.decode_infer(
            body.content, INFO, request_id="r", arrival_s=0.0, header_length=body.header_length
        )

    call = decode()
    core = StubCore()
    core.submit(call.request)
    (outcome,) = core.take_outbox()
    return {
        "decode": median_us(decode),
        "encode": median_us(lambda: oip_http.encode_infer(call, outcome.response, INFO.name)),
    }


def grpc_call(port: int, ids: Ids) -> Callable[[], object]:
    """A call of one request over gRPC with raw contents."""
    import grpc

    from engine.entrypoints.grpc.inference_pb2 import ModelInferRequest

    message = ModelInferRequest(model_name=INFO.name)
    for name, datatype, values in (
        ("user_id", "BYTES", struct.pack("<I", 6) + b"user-1"),
        ("history", "INT64", ids.history.tobytes()),
        ("candidates", "INT64", ids.candidates.tobytes()),
    ):
        count = 1 if datatype == "BYTES" else len(values) // 8
        message.inputs.add(name=name, datatype=datatype, shape=[count])
        message.raw_input_contents.append(values)
    content = message.SerializeToString()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    return lambda: infer(content)


class Round(NamedTuple):
    """One round's numbers."""

    direct_us: float
    latency_us: dict[str, float]
    per_second: dict[str, float]
    server_cpu_us: dict[str, float]


def run_round(running: Running, ids: Ids, seconds: float, connections: int) -> Round:
    latency_us, per_second, server_cpu_us = {}, {}, {}
    for form, body in (("binary", binary_body(ids)), ("json", json_body(ids))):
        request = http_request(body)
        alone = run_load(running.http, request, 1, seconds)
        latency_us[form] = round(statistics.median(alone.latencies_s) * 1e6, 1)
        began_cpu_s = running.cpu_s()
        many = run_load(running.http, request, connections, seconds)
        cpu_s = running.cpu_s() - began_cpu_s
        per_second[form] = round(many.per_second)
        server_cpu_us[form] = round(cpu_s / (len(many.latencies_s) + connections) * 1e6, 1)
    latency_us["grpc"] = median_us(grpc_call(running.grpc, ids), 1000)
    return Round(direct_us(ids), latency_us, per_second, server_cpu_us)


def main() -> None:
    from benchmarks.provenance import write_result

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--server-cpu", type=int, default=0)
    parser.add_argument("--client-cpu", type=int, default=1)
    parser.add_argument("--flags", nargs="*", default=[], help="more flags of the server, no --")
    parser.add_argument("--output", help="write the result, with provenance, to this file")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.client_cpu})
    ids = random_ids()
    flags = [f"--{flag}" for flag in options.flags]
    with server(options.server_cpu, options.client_cpu, *flags) as running:
        rounds = [
            run_round(running, ids, options.seconds, options.connections)
            for _ in range(options.rounds)
        ]
    latency_us = {form: min(one.latency_us[form] for one in rounds) for form in rounds[0][1]}
    best_direct_us = min(one.direct_us for one in rounds)
    overhead_us = {form: round(us - best_direct_us, 1) for form, us in latency_us.items()}
    per_second = {form: max(one.per_second[form] for one in rounds) for form in rounds[0][2]}
    server_cpu_us = {form: min(one.server_cpu_us[form] for one in rounds) for form in per_second}
    write_result(
        options.output,
        {
            "config": {
                "history": HISTORY, "candidates": CANDIDATES, "connections": options.connections,
                "seconds": options.seconds, "rounds": options.rounds, "flags": flags,
            },
            "codec_us": {
                "binary": codec_us(binary_body(ids)), "json": codec_us(json_body(ids)),
            },
            "direct_us": best_direct_us,
            "latency_us": latency_us,
            "overhead_us": overhead_us,
            "throughput_per_second": per_second,
            "server_cpu_us": server_cpu_us,
            "rounds": [one._asdict() for one in rounds],
            "limits": LIMITS,
            "is_within_limits": (
                overhead_us["binary"] <= LIMITS["binary_overhead_us"]
                and overhead_us["json"] <= LIMITS["json_overhead_us"]
                and per_second["binary"] >= LIMITS["binary_per_second"]
            ),
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
