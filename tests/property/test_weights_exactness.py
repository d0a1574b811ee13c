"""Weights are swapped at random under requests: every answer is, bit for bit, what the version it
names computes without a cache, and every request and command has exactly one end.
"""

import os
import random

import msgspec
import numpy as np
import pytest
import torch
from engine_models import CONFIGS, NUM_ITEMS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.assembly import Hooks
from engine.commands import (
    ActivateWeights,
    ForgetUser,
    ListUsers,
    LoadCatalogue,
    LoadWeights,
    Reply,
    ResetCache,
    RetireWeights,
)
from engine.config import (
    AttentionConfig,
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    WeightsConfig,
)
from engine.engine import Engine
from engine.models.loader import save_model_dir
from engine.request_builder import build_request
from engine.testing.models import random_tensors
from engine.types import Outcome, Task

EXAMPLES = int(os.environ.get("ENGINE_PROPERTY_EXAMPLES", "12"))
ACTIONS = int(os.environ.get("ENGINE_PROPERTY_STEPS", "25")) * 4
VERSIONS = ("v0", "v1", "v2")
USERS = ("ann", "bob", "cid", "dot")
NUM_NEW_ITEMS = 10


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a model directory for each version, and one with a larger item table each."""
    root = tmp_path_factory.mktemp("weights")
    for seed, version in enumerate(VERSIONS):
        config = msgspec.structs.replace(CONFIGS["append"], weights_version=version)
        tensors = random_tensors(config, seed=seed)
        save_model_dir(root / version, config, tensors)
        save_model_dir(root / f"{version}-more", *with_more_items(config, tensors))
    return root


def with_more_items(config, tensors):
    item = config.inputs.features[0]
    more = msgspec.structs.replace(item, num_rows=item.num_rows + NUM_NEW_ITEMS)
    inputs = msgspec.structs.replace(config.inputs, features=(more, *config.inputs.features[1:]))
    new_ids = 10 * torch.arange(NUM_ITEMS, NUM_ITEMS + NUM_NEW_ITEMS) + 1
    generator = torch.Generator().manual_seed(99)
    rows = torch.randn(NUM_NEW_ITEMS, item.width or 16, generator=generator)
    larger = dict(tensors)
    larger["catalogue.item_ids"] = torch.cat([tensors["catalogue.item_ids"], new_ids])
    larger["embeddings.item"] = torch.cat([tensors["embeddings.item"], rows])
    return msgspec.structs.replace(config, inputs=inputs), larger


@pytest.fixture(scope="module", params=["cpu", "reference", "torch"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def judges(models, backend):
    """An engine without a cache for each version and each size of its item table."""
    config = EngineConfig(
        cache=CacheConfig(tiers="off", device_pages=64, page_size=5, chunk_size=5),
        attention=AttentionConfig(backend=backend),
    )
    engines = {
        name: Engine.from_model_dir(str(models / name), config)
        for version in VERSIONS
        for name in (version, f"{version}-more")
    }
    yield engines
    for engine in engines.values():
        engine.close()


class Swapping:
    """A small engine, its clients, and somebody who swaps its weights."""

    def __init__(self, models, backend, judges, seed):
        self.random = random.Random(seed)
        self.judges = judges
        config = EngineConfig(
            cache=CacheConfig(
                page_size=4,
                chunk_size=8,
                device_pages=self.random.choice([16, 24, 40]),
                host_bytes=self.random.choice([0, 1 << 14, 1 << 20]),
                poison=True,
            ),
            scheduler=SchedulerConfig(
                max_batch_tokens=self.random.choice([16, 40]),
                max_batch_requests=3,
                max_uncut_tokens=80,
            ),
            attention=AttentionConfig(backend=backend),
            weights=WeightsConfig(max_weights_versions=2, refresh_users=3, canary_share=0.3),
            check_invariants=True,
        )
        hooks = Hooks(uses_device_thread=self.random.random() < 0.5)
        self.engine = Engine.from_model_dir(str(models / "v0"), config, hooks)
        self.core = self.engine.core
        self.histories = {user: [] for user in USERS}
        self.num_items = dict.fromkeys(VERSIONS, NUM_ITEMS)
        self.open_requests, self.open_commands, self.grown = {}, {}, set()
        self.num_answers, self.num_asked = 0, 0

    # What happens

    def act(self):
        action = self.random.choice(
            ["ask"] * 6 + ["step"] * 6 + ["load", "activate", "activate", "retire", "grow",
                                         "forget", "reset", "users"]
        )  # fmt: skip
        getattr(self, action)()
        self.collect()

    def ask(self):
        user = self.random.choice(USERS)
        history = self.histories[user]
        history += [self.random.randrange(NUM_ITEMS) for _ in range(self.random.randrange(6))]
        if self.random.random() < 0.1 and history:
            history[self.random.randrange(len(history))] = self.random.randrange(NUM_ITEMS)
        del history[: len(history) - 44]
        named = self.random.choice([None, None, *VERSIONS])
        self.num_asked += 1
        request = build_request(
            task=Task.RANK,
            user_id=user,
            history=[10 * item + 1 for item in history],
            candidates=[10 * self.random.randrange(NUM_ITEMS) + 1 for _ in range(3)],
            weights_version=named,
            request_id=f"r{self.num_asked}",
        )
        self.open_requests[request.request_id] = request
        self.core.submit(request)

    def step(self):
        for _ in range(self.random.randrange(1, 5)):
            if not self.core.step():
                self.core.wait(0.002)

    def run(self, command):
        ticket = f"c{self.num_asked}-{len(self.open_commands)}-{self.random.random()}"
        self.open_commands[ticket] = command
        self.core.run(ticket, command)

    def load(self):
        self.run(LoadWeights(path=self.random.choice(VERSIONS)))

    def activate(self):
        policy = self.random.choice(["lazy", "drop", "refresh"])
        version = self.random.choice(VERSIONS)
        self.run(ActivateWeights(version=version, policy=policy, budget_s=0.05))

    def retire(self):
        mode = self.random.choice(["wait", "fail"])
        self.run(RetireWeights(version=self.random.choice(VERSIONS), mode=mode))

    def grow(self):
        version = self.random.choice(VERSIONS)
        self.run(LoadCatalogue(path=f"{version}-more", version=version))

    def forget(self):
        self.run(ForgetUser(namespace="", user_id=self.random.choice(USERS)))

    def reset(self):
        self.run(ResetCache())

    def users(self):
        self.run(ListUsers(limit=3))

    # What came out

    def collect(self):
        for message in self.core.take_outbox():
            if isinstance(message, Outcome):
                self.check(self.open_requests.pop(message.request_id), message)
            elif isinstance(message, Reply):
                self.open_commands.pop(message.ticket)
                if message.error is not None:
                    assert message.error.code in ("config_error", "unknown_model"), message.error

    def check(self, request, outcome):
        if outcome.error is not None:
            allowed = {"weights_retired", "unknown_model", "too_large"}
            assert outcome.error.code in allowed, outcome.error
            return
        version = outcome.response.usage.weights_version
        if request.weights_version is not None:
            assert version == request.weights_version
        unnamed = msgspec.structs.replace(request, weights_version=None)
        judge = self.judges[self.random.choice([version, f"{version}-more"])]
        (expected,) = judge.run([unnamed])
        np.testing.assert_array_equal(
            outcome.response.scores, expected.response.scores, strict=True
        )
        self.num_answers += 1

    def finish(self):
        while not self.core.is_idle:
            self.step()
            self.collect()
        self.collect()
        assert not self.open_requests and not self.open_commands
        self.reset()
        self.engine.drain_transfers()
        self.collect()
        usage = self.core.usage()
        assert (usage.pages_used, usage.chunks_used, usage.num_users) == (0, 0, 0)
        self.core.check_invariants()
        self.engine.close()


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_answer_is_of_the_version_it_names(models, backend, judges, seed):
    swapping = Swapping(models, backend, judges, seed)
    for _ in range(ACTIONS):
        swapping.act()
    swapping.finish()
    assert swapping.num_answers > 0
