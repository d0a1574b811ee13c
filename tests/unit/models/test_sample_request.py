"""Made-up requests for warming up: what the model says, the engine serves."""

import msgspec
import numpy as np
import pytest
from engine_models import CONFIGS, MAX_EVENTS

from engine.assembly import Hooks, build_core
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.models.config import Feature
from engine.models.hstu.model import HstuModel
from engine.testing.models import random_tensors
from engine.types import Task


def _with_inputs(name, **inputs):
    config = CONFIGS[name]
    return msgspec.structs.replace(config, inputs=msgspec.structs.replace(config.inputs, **inputs))


MODELS = {
    **CONFIGS,
    "time buckets": _with_inputs(
        "append", positions="from_newest", num_positions=64, num_time_buckets=8
    ),
    "features": _with_inputs(
        "append",
        features=(
            *CONFIGS["append"].inputs.features,
            Feature(name="price", dim=3),
            Feature(name="volume", on="history"),
            Feature(name="shop", num_rows=5, on="candidates"),
        ),
    ),
    "only retrieve": msgspec.structs.replace(CONFIGS["append"], rank=None),
}


def model_of(config):
    return HstuModel(config, random_tensors(config))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", [None, *Task])
def test_sample_of_every_model_is_served(name, task):
    model = model_of(MODELS[name])
    if name == "only retrieve" and task is Task.RANK:
        return
    config = EngineConfig(
        cache=CacheConfig(page_size=4, chunk_size=8, device_pages=64, host_bytes=0)
    )
    with Engine(build_core(model, config, Hooks(uses_device_thread=False))) as engine:
        request = model.sample_request(20, 6, task)
        if name == "time buckets" and task is Task.PREFETCH:
            return  # nothing of it can be kept, whatever the request
        (outcome,) = engine.run([request])
    assert outcome.error is None, outcome.error
    per_event = model.spec.tokens_per_event
    provisional = model.spec.has_next_event_bias
    assert outcome.response.usage.history_length == (
        model.spec.num_context + 20 * per_event - provisional
    )
    expected = task or (Task.RETRIEVE if name == "only retrieve" else Task.RANK)
    assert request.task is expected
    if expected is Task.RANK:
        assert outcome.response.scores.shape == (6, 2)
    if expected is Task.RETRIEVE:
        assert len(outcome.response.items) == 10


def test_sample_has_no_more_events_than_the_model_serves():
    model = model_of(CONFIGS["append"])
    request = model.sample_request(10_000, 100)
    assert len(request.history["item"]) == MAX_EVENTS
    assert len(request.candidates["item"]) == 100, "more than the catalogue has: it is repeated"
    assert model.prepare(request).length == MAX_EVENTS


def test_sample_of_no_events_ranks():
    prepared = model_of(CONFIGS["interleaved"]).prepare(
        model_of(CONFIGS["interleaved"]).sample_request(0, 3)
    )
    assert (prepared.length, prepared.num_candidates) == (1, 3)


def test_sample_goes_through_the_rows_of_every_table():
    request = model_of(MODELS["features"]).sample_request(7, 6)
    assert request.history["price"].shape == (7, 3)
    assert "shop" not in request.history
    assert request.candidates["shop"].tolist() == [0, 1, 2, 3, 4, 0]
    np.testing.assert_array_equal(request.history["item"], [1, 11, 21, 31, 41, 51, 61])
