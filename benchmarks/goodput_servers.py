"""The servers that `goodput` compares: one model directory, three commands."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.goodput_load import LoadShape
from engine.config import AttentionConfig, CacheConfig, EngineConfig, SchedulerConfig
from engine.models.config import Feature, HstuLayers, Inputs, ModelConfig, RankHead

PAGE_SIZE = 32
CHUNK_SIZE = 256
_START_TIMEOUT_S = 600.0
_ROOT = Path(__file__).resolve().parents[1]


class Server(NamedTuple):
    """How to start a server: its command for a port, and where it says that it is ready."""

    name: str
    command: Callable[[int], list[str]]
    ready_path: str


def model_config(options: argparse.Namespace, shape: LoadShape) -> ModelConfig:
    return ModelConfig(
        name="goodput",
        dtype=options.dtype,
        layers=HstuLayers(
            family="nvidia", num_layers=options.layers, hidden_size=options.hidden,
            num_heads=options.heads, qk_dim=options.width, v_dim=options.width,
            scale_length=shape.max_events,
        ),
        inputs=Inputs(
            features=(Feature(name="item", num_rows=shape.num_items),),
            positions="from_start",
            num_positions=shape.max_events + 1,
            max_history_events=shape.max_events,
        ),
        rank=RankHead(kind="mlp"),
    )  # fmt: skip


def engine_config(options: argparse.Namespace, shape: LoadShape, tiers: str) -> EngineConfig:
    """Pools for half of the users on the device and for all, and new ones, on the host."""
    user_pages = -(-shape.longest // PAGE_SIZE)
    longest_pages = -(-shape.max_events // PAGE_SIZE)
    token_bytes = 2 * options.layers * options.heads * options.width
    token_bytes *= 4 if options.dtype == "float32" else 2
    chunk_tokens = -(-shape.longest // CHUNK_SIZE) * CHUNK_SIZE
    is_tiered = tiers == "tiered"
    num_pages = shape.num_users // 2 * user_pages if is_tiered else 16 * longest_pages
    return EngineConfig(
        cache=CacheConfig(
            tiers="tiered" if is_tiered else "off",
            device_pages=max(num_pages, 2 * longest_pages),
            page_size=PAGE_SIZE,
            chunk_size=CHUNK_SIZE,
            host_bytes=int(1.5 * shape.num_users * chunk_tokens * token_bytes),
        ),
        scheduler=SchedulerConfig(
            max_batch_requests=options.max_batch,
            max_batch_tokens=options.max_batch_tokens,
            max_piece_tokens=options.max_piece_tokens,
        ),
        attention=AttentionConfig(backend=options.backend),
        threads=options.threads,
    )


def servers(options: argparse.Namespace, shape: LoadShape, folder: Path) -> list[Server]:
    """The three servers. Writes their configurations to the folder."""
    model = str(folder / "model")

    def plain(port: int) -> list[str]:
        return ["benchmarks.baselines.plain_server", "--model", model, "--port", str(port),
                "--max-batch", str(options.plain_max_batch),
                "--typical-history", str(shape.history)]  # fmt: skip

    def ours(tiers: str) -> Callable[[int], list[str]]:
        def command(port: int) -> list[str]:
            settings = {
                "model": model,
                "server": {"port": port, "access_log_format": "off"},
                "engine": msgspec.to_builtins(engine_config(options, shape, tiers)),
            }
            file = folder / f"{tiers}.yaml"
            file.write_text(json.dumps(settings))  # JSON is YAML
            return ["engine.entrypoints.api_server", "--config", str(file)]

        return command

    return [
        Server("plain", plain, "/health"),
        Server("recompute", ours("off"), "/v2/health/ready"),
        Server("tiered", ours("tiered"), "/v2/health/ready"),
    ]


@contextlib.contextmanager
def running(server: Server, folder: Path) -> Iterator[tuple[int, Any]]:
    """The server until the block ends: its port, and what it says of itself when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log_file = folder / f"{server.name}.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *server.command(port)],
            stdout=log, stderr=subprocess.STDOUT, cwd=_ROOT,
        )  # fmt: skip
    try:
        yield port, _wait_ready(process, port, server, log_file)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port: int, server: Server, log: Path) -> Any:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    url = f"http://127.0.0.1:{port}{server.ready_path}"
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            content = answer.read()
            return json.loads(content) if content else None
        time.sleep(0.2)
    tail = log.read_text(errors="replace")[-3000:]
    raise RuntimeError(f"the {server.name} server is not ready; the end of its log:\n{tail}")
