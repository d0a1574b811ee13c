"""Everything at once, for minutes: `python -m tests.chaos.run [--seconds 600]`.

200 users append, edit, prefetch, forget, come too late and go away in the middle of a request,
against a server whose copies fail now and then, whose weights are swapped every few seconds, and
whose core is killed every half a minute and started again by a supervisor. Every request must have
exactly one outcome, every score must be, bit for bit, a recompute by the version it names, and the
memory of the server and of the core must stay flat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from engine.models.config import Feature, HstuLayers, Inputs, ModelConfig, RankHead
from engine.testing.models import save_random_model
from tests.chaos.clients import MAX_EVENTS, NUM_ITEMS, Clients
from tests.chaos.judge import Judge, Verdict
from tests.chaos.supervisor import Life, Supervisor

VERSIONS = ("v0", "v1", "v2")
FLAGS = (
    "--device-pages", "1200", "--page-size", "8", "--chunk-size", "32",
    "--host-bytes", "4000000", "--refresh-users", "20", "--canary-share", "0.2",
    "--check-invariants", "--threads", "1", "--no-access-log",
)  # fmt: skip
SETTLING_S = 15.0
MAX_GROWTH = 1.05


def save_models(root: Path) -> None:
    for seed, version in enumerate(VERSIONS):
        config = ModelConfig(
            name="chaos",
            weights_version=version,
            layers=HstuLayers(
                family="meta", num_layers=2, hidden_size=32, num_heads=2, qk_dim=16, v_dim=16,
                scale_length=MAX_EVENTS + 8,
            ),
            inputs=Inputs(
                features=(Feature(name="item", num_rows=NUM_ITEMS),), positions="from_start",
                num_positions=MAX_EVENTS + 9, max_history_events=MAX_EVENTS + 8,
            ),
            rank=RankHead(kind="dot"),
        )  # fmt: skip
        save_random_model(root / version, config, seed=seed)


async def swap_weights(port: int, every_s: float, seed: int, changes: Counter[str]) -> None:
    """Load, activate and retire at random until cancelled."""
    choose = random.Random(seed)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        while True:
            await asyncio.sleep(every_s * choose.random() * 2)
            version = choose.choice(VERSIONS)
            name, body = choose.choice(
                [
                    ("load", {"path": version, "canary": choose.choice([0.0, 0.3])}),
                    ("activate", {"version": version, "policy": choose.choice(
                        ["lazy", "drop", "refresh"]), "budget_s": 1.0}),
                    ("retire", {"version": version, "mode": choose.choice(["wait", "fail"])}),
                ]
            )  # fmt: skip
            try:
                answer = await client.post(f"/v1/weights:{name}", json=body)
            except httpx.TransportError:
                continue
            changes[f"{name} {answer.status_code}"] += 1


async def kill_cores(supervisor: Supervisor, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        supervisor.kill_core()


async def judge_answers(clients: Clients, judge: Judge, verdicts: list[Verdict]) -> None:
    """Take what was answered and recompute it, in a thread; until cancelled."""
    while True:
        await asyncio.sleep(0.5)
        batch, clients.answered = clients.answered, []
        if batch:
            verdicts.append(await asyncio.to_thread(judge.judge, batch))


async def until_ready(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        while True:
            try:
                if (await client.get("/v2/health/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


async def chaos(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    flags = ["--model", str(root / VERSIONS[0]), *FLAGS]
    supervisor = Supervisor(flags, Path(options.log) if options.log else root / "server.log")
    clients = Clients(supervisor.port, options.users, options.tasks, options.seed)
    judge, verdicts, changes = Judge(root), list[Verdict](), Counter[str]()
    supervising = asyncio.ensure_future(supervisor.run())
    await asyncio.wait_for(until_ready(supervisor.port), 120)
    asking = asyncio.ensure_future(clients.run())
    troubles = [
        asyncio.ensure_future(swap_weights(supervisor.port, 2.0, options.seed, changes)),
        asyncio.ensure_future(kill_cores(supervisor, options.kill_every)),
    ]
    judging = asyncio.ensure_future(judge_answers(clients, judge, verdicts))
    await asyncio.sleep(options.seconds)
    for trouble in troubles:
        trouble.cancel()
    clients.stop()
    await asyncio.wait_for(asking, 2 * clients.TIMEOUT_S)
    judging.cancel()
    await asyncio.wait((judging,))
    verdicts.append(judge.judge(clients.answered))
    await asyncio.wait_for(until_ready(supervisor.port), 120)
    pools = await final_state(supervisor.port)
    await supervisor.stop()
    await asyncio.wait_for(supervising, 60)
    judge.close()
    return report(supervisor, clients, verdicts, changes, pools)


async def final_state(port: int) -> dict[str, int]:
    """What is still in use once every user has been removed."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        (await client.post("/v1/cache:reset")).raise_for_status()
        status = (await client.get("/v1/status")).json()
    names = ("requests_waiting", "requests_running", "device_pages_used", "host_chunks_used")
    return {name: status[name] for name in names}


def growth(lives: list[Life]) -> dict[str, float]:
    """The largest growth of resident memory within a life, from `SETTLING_S` on."""
    grown = {"front": 1.0, "core": 1.0}
    for life in lives:
        settled = [weight for weight in life.weights if weight.age_s >= SETTLING_S]
        if len(settled) < 4:
            continue
        first, last = settled[len(settled) // 4], settled[-1]
        grown["front"] = max(grown["front"], last.front_bytes / first.front_bytes)
        grown["core"] = max(grown["core"], last.core_bytes / first.core_bytes)
    return {name: round(value, 4) for name, value in grown.items()}


def report(
    supervisor: Supervisor,
    clients: Clients,
    verdicts: list[Verdict],
    changes: Counter[str],
    pools: dict[str, int],
) -> dict[str, Any]:
    """The numbers, and `faults`: what must not have happened."""
    wrong = [text for verdict in verdicts for text in verdict.wrong]
    grown = growth(supervisor.lives)
    faults = [f"wrong score: {text}" for text in wrong[:5]]
    faults += [f"no outcome: {text}" for text in clients.hanging[:5]]
    faults += [f"still in use: {name} {value}" for name, value in pools.items() if value]
    faults += [
        f"memory of the {name} grew {value} times"
        for name, value in grown.items()
        if value > MAX_GROWTH
    ]
    faults += [
        f"unexpected outcome: {code}"
        for code in ("internal", "invariant_error", "engine_error", "invalid_request")
        if clients.outcomes[code]
    ]
    statuses = [life.status for life in supervisor.lives]
    if statuses[-1] != 0:
        faults.append(f"the last exit status is {statuses[-1]}")
    return {
        "requests": sum(clients.outcomes.values()),
        "outcomes": dict(clients.outcomes.most_common()),
        "answers_checked": sum(verdict.num_checked for verdict in verdicts),
        "answers_wrong": len(wrong),
        "weights_changes": dict(sorted(changes.items())),
        "cores_killed": supervisor.num_kills,
        "exit_statuses": statuses,
        "memory_growth": grown,
        "in_use_at_the_end": pools,
        "faults": faults,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=24, help="requests at a time")
    parser.add_argument("--kill-every", type=float, default=45.0, help="seconds between kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", help="keep the server's log here")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "models"
        root.mkdir()
        save_models(root)
        result = asyncio.run(chaos(options, root))
    print(json.dumps(result, indent=2))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
