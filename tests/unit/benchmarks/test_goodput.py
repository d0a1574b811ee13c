"""How goodput is looked for, who asks, and that the plain server's model is the same model."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.baselines.plain_model import (
    PlainHstu,
    PlainRanker,
    Query,
    blocked_attention,
    dense_attention,
)
from benchmarks.goodput import Plan, Probe, goodput
from benchmarks.goodput_load import LoadShape, Population, http_post
from benchmarks.open_loop import Due, OpenLoop, Stop
from engine.config import AttentionConfig, CacheConfig, EngineConfig
from engine.engine import Engine
from engine.models.config import Feature, HstuLayers, Inputs, ModelConfig, RankHead
from engine.testing.models import save_random_model

SHAPE = LoadShape(
    num_users=6, history=64, max_new=8, candidates=(3, 5), zipf=0.8, new_user_share=0.1,
    num_items=50,
)  # fmt: skip


def probe_at(rate, limit):
    return Probe(rate, 100, 100, 0, 0, 1.0, 1.0, rate <= limit, None)


@pytest.mark.parametrize("limit", [1.3, 3.0, 4.0, 57.0])
def test_goodput_is_just_below_the_rate_that_fails(limit):
    plan = Plan(first_rate=4.0, seconds=1.0, min_requests=1, resolution=0.05, tries=1)
    found, probes = goodput(lambda rate: probe_at(rate, limit), plan)
    assert limit / 1.05 <= found <= limit
    assert len(probes) < 15


def test_goodput_is_zero_when_no_rate_passes():
    plan = Plan(first_rate=4.0, seconds=1.0, min_requests=1, resolution=0.05, tries=2)
    found, probes = goodput(lambda rate: probe_at(rate, 0.0), plan)
    assert found == 0.0
    assert [one.rate for one in probes][:4] == [4.0, 4.0, 2.0, 2.0]


def body_of(due):
    return json.loads(due.request.partition(b"\r\n\r\n")[2])


def test_histories_grow_and_arrivals_follow_one_another():
    population = Population(SHAPE, seed=3)
    assert len(population.renew()) == 6
    dues = population.arrivals(rate=100.0, count=40)
    assert all(one.at_s <= two.at_s for one, two in pairwise(dues))
    last = {}
    for body in map(body_of, dues):
        history = last.get(body["user_id"], [])
        assert body["history"][: len(history)] == history
        assert 3 <= len(body["candidates"]) <= 5
        last[body["user_id"]] = body["history"]
    assert len(last) > 6
    grown = [user for user, history in last.items() if len(history) >= SHAPE.longest]
    replaced = {body_of(due)["user_id"] for due in population.renew()}
    assert len(replaced) <= len(grown)
    assert not replaced & last.keys()


class Answering(BaseHTTPRequestHandler):
    """Echoes a body; one that says `fail` gets 500, one that says `close` no answer."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if body == b"close":
            self.close_connection = True
            return
        self.send_response(500 if body == b"fail" else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def port():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_open_loop_tells_answers_errors_and_closed_connections(port):
    words = ["one", "fail", "close", "two", "three"]
    dues = [Due(0.01 * number, http_post(word)) for number, word in enumerate(words)]
    outcome = OpenLoop(port, dues).run()
    answers = sorted(outcome.answers)
    assert [answer.status for answer in answers] == [200, 500, 0, 200, 200]
    assert [answers[index].body for index in (0, 3, 4)] == [b"one", b"two", b"three"]
    assert not outcome.gave_up


def test_open_loop_gives_up_when_too_many_failed(port):
    dues = [Due(0.0, http_post("fail")), Due(0.0, http_post("fail")), Due(60.0, http_post("one"))]
    outcome = OpenLoop(port, dues).run(Stop(objective_s=30.0, max_late=1))
    assert outcome.gave_up
    assert [answer.status for answer in outcome.answers] == [500, 500]


@pytest.mark.parametrize("attention", [dense_attention, blocked_attention])
def test_plain_model_gives_the_engine_s_scores(tmp_path, attention):
    config = ModelConfig(
        name="plain",
        layers=HstuLayers(
            family="nvidia", num_layers=2, hidden_size=32, num_heads=2, qk_dim=16, v_dim=16,
            scale_length=600,
        ),
        inputs=Inputs(
            features=(Feature(name="item", num_rows=90),), positions="from_start",
            num_positions=300, max_history_events=600,
        ),
        rank=RankHead(kind="mlp"),
    )  # fmt: skip
    save_random_model(tmp_path, config, seed=5)
    rng = np.random.default_rng(11)
    queries = [
        Query(
            (rng.integers(0, 90, n) * 10 + 1).tolist(), (rng.integers(0, 90, c) * 10 + 1).tolist()
        )
        for n, c in ((301, 7), (40, 3), (570, 5))
    ]
    settings = EngineConfig(
        attention=AttentionConfig(backend="reference"),
        cache=CacheConfig(tiers="off", device_pages=64),
    )
    engine = Engine.from_model_dir(str(tmp_path), settings)
    expected = [
        engine.rank(user_id="u", history=query.history, candidates=query.candidates).scores[:, 0]
        for query in queries
    ]
    engine.close()
    model = PlainHstu(Path(tmp_path), torch.float32, attention)
    for found, scores in zip(
        PlainRanker(model, model, "", {}).rank(queries), expected, strict=True
    ):
        np.testing.assert_allclose(found, scores, rtol=2e-5, atol=2e-5)
