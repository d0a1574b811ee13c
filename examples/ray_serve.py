"""Replicas of the engine on a Ray cluster, every user's requests at the same replica.

    pip install 'mtserve[server]' 'ray[serve]'
    python examples/ray_serve.py --model DIR --replicas 2      # without --model: random weights

    curl localhost:8000/v1/rank -H 'x-session-id: u1' \
        -d '{"user_id": "u1", "history": [50, 172], "candidates": [181, 1]}'

A user's K/V is in the memory of one replica, so the user id must choose the replica. Ray Serve's
`ConsistentHashRouter` hashes the session id of a request: over HTTP that is the header
`x-session-id` (`RAY_SERVE_SESSION_ID_HEADER_KEY` names another one), through a handle it is
`handle.options(session_id=...)`. When a replica comes or goes, only the users whose place on the
ring changes meet a replica that does not know them; their answers are the same, computed anew.
"""

from __future__ import annotations

import argparse
import math
import signal
import threading
import time
import uuid

import ray
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from engine import AsyncEngine, EngineConfig
from engine.config import CacheConfig
from engine.entrypoints import native_api
from engine.entrypoints.protocol import error_body, to_json
from engine.errors import EngineError, InvalidRequest, Overloaded, UnknownModel
from engine.types import Request, Task

SESSION_HEADER = "x-session-id"
REPLICA_HEADER = "x-replica"
TASKS = {"/v1/rank": Task.RANK, "/v1/retrieve": Task.RETRIEVE}
DRAIN_TIMEOUT_S = 30.0

BY_USER = RequestRouterConfig(
    request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
    # A replica that is full passes a request on to the next one of the ring, where it is
    # recomputed. 0 would make it wait instead.
    request_router_kwargs={"num_virtual_nodes": 100, "num_fallback_replicas": 1},
)


@serve.deployment(
    request_router_config=BY_USER,
    # The engine has a queue and forms batches itself: it should see all requests, and answers 429
    # when it has too many.
    max_ongoing_requests=512,
    graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
)
class Recommender:
    """One replica: an engine whose core runs in a process of its own.

    It takes the native JSON of `mtserve serve`, one user a request. (A class of this file that
    Ray sends to a replica must survive pickling by value; structs of the package do not have to.)
    """

    async def __init__(self, model: str | None, config: EngineConfig) -> None:
        self._engine = AsyncEngine.from_model_dir(model, config)
        await self._engine.start()

    async def __del__(self) -> None:
        """Ray awaits this when it stops a replica: pending requests are answered first."""
        await self._engine.stop(DRAIN_TIMEOUT_S)

    def check_health(self) -> None:
        """Ray replaces a replica whose core has ended."""
        if not self._engine.is_ready:
            raise self._engine.refusal()

    async def __call__(self, http: HttpRequest) -> HttpResponse:
        """One request over HTTP. When the client leaves, Ray cancels this call."""
        headers = {REPLICA_HEADER: serve.get_replica_context().replica_id.unique_id}
        try:
            request = await decode(http)
            answer = native_api.encode_response(await self._engine.submit(request))
            return HttpResponse(to_json(answer), 200, headers, "application/json")
        except EngineError as error:
            if isinstance(error, Overloaded):
                headers["retry-after"] = str(math.ceil(error.retry_after_s))
            body = to_json(error_body(error))
            return HttpResponse(body, error.status, headers, "application/json")


async def decode(http: HttpRequest) -> Request:
    """The request of a body. Raises InvalidRequest when another replica may own its user."""
    task = TASKS.get(http.url.path)
    if task is None:
        raise UnknownModel(f"{http.url.path} is not there: POST to {' or '.join(TASKS)}")
    call = native_api.decode_call(
        await http.body(),
        task,
        request_id=http.headers.get("x-request-id") or uuid.uuid4().hex,
        arrival_s=time.monotonic(),
        max_requests=1,
    )
    (request,) = call.requests
    if not isinstance(request, Request):
        raise request
    session_id = http.headers.get(SESSION_HEADER)
    if request.user_id != session_id:
        raise InvalidRequest(
            f"header {SESSION_HEADER} is {session_id!r} and user_id is {request.user_id!r}: send "
            "the user id in both, the header chooses the replica"
        )
    return request


def main() -> None:
    parser = argparse.ArgumentParser(description="Replicas of the engine behind Ray Serve.")
    parser.add_argument("--model", help="model directory; without it, random weights")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cores", type=float, default=1.0, help="cores that a replica reserves")
    parser.add_argument("--host-bytes", type=int, default=1 << 30, help="host tier of a replica")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    config = EngineConfig(
        cache=CacheConfig(host_bytes=options.host_bytes), threads=max(1, int(options.cores))
    )
    replicas = Recommender.options(
        num_replicas=options.replicas, ray_actor_options={"num_cpus": options.cores}
    )
    if not ray.is_initialized():
        ray.init(include_dashboard=False)
    serve.start(http_options=HTTPOptions(port=options.port))
    serve.run(replicas.bind(options.model, config), name="mtserve", route_prefix="/")
    print(f"{options.replicas} replicas listen on http://127.0.0.1:{options.port}", flush=True)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
