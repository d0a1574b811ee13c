"""A delta request is prepared as the whole request that it stands for, from its base on."""

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from engine_models import CONFIGS, MAX_EVENTS, NUM_ITEMS
from hypothesis import given, settings

from engine.block_manager.fingerprint import HashChain
from engine.errors import HistoryNeeded
from engine.models.config import ContextFeature, Feature
from engine.models.hstu.model import HstuModel
from engine.request_builder import build_request
from engine.scheduler.delta import NO_BASE, delta_chain, next_base
from engine.testing.models import random_tensors
from engine.types import Task

PAGE_SIZES = st.sampled_from([1, 2, 3, 4, 8])


def _changed(name, *, catalogue=None, **inputs):
    config = CONFIGS[name]
    return msgspec.structs.replace(
        config,
        inputs=msgspec.structs.replace(config.inputs, **inputs),
        catalogue=msgspec.structs.replace(config.catalogue, **(catalogue or {})),
    )


_KEEP = {"overlong": "keep_newest", "keep_stride": 4, "max_history_events": 20}
CASES = {
    "append": CONFIGS["append"],
    "stride": _changed("stride", **_KEEP),
    "interleaved": CONFIGS["interleaved"],
    "interleaved, cut": _changed("interleaved", **_KEEP),
    "context": _changed("append", context=(ContextFeature(name="segment", num_rows=4),)),
    "window": CONFIGS["window"],
    "unk": _changed("append", catalogue={"unknown_history": "unk"}),
    "features": _changed(
        "append",
        features=(
            Feature(name="item", num_rows=NUM_ITEMS + 1),
            Feature(name="price", dim=2, on="history"),
            Feature(name="shop", num_rows=7),
        ),
        positions="none",
        num_positions=0,
    ),
}


def _model(config):
    return HstuModel(config, random_tensors(config))


MODELS = {name: _model(config) for name, config in CASES.items()}


def _events(config, numbers, start, is_open):
    """Events [start, n) as the model reads them; a number from NUM_ITEMS on is not known."""
    numbers = np.array(numbers, np.int64)
    history = {"item": 10 * numbers + 1}
    for feature in config.inputs.features[1:]:
        if feature.num_rows:
            history[feature.name] = numbers % feature.num_rows
        else:
            history[feature.name] = np.stack([numbers, 1 / (1 + numbers)], 1).astype(np.float32)
    history = {name: values[start:] for name, values in history.items()}
    if is_open and "action" in history:
        history["action"] = history["action"][:-1]
    return history


def _request(config, numbers, task, *, start=0, is_open=False, **options):
    history = _events(config, numbers, start, is_open)
    if config.inputs.context:
        options.setdefault("context", [2])
    if task is Task.RANK:
        options["candidates"] = {"item": [1, 11, 11, 31]}
        if any(feature.name == "shop" for feature in config.inputs.features):
            options["candidates"]["shop"] = [0, 1, 2, 3]
    return build_request(task=task, user_id="u", history=history, **options)


def _base_of(model, request, page_size):
    prepared = model.prepare(request)
    chain = HashChain.from_records(prepared.records, prepared.seed, page_size)
    return next_base(prepared, chain, model.spec)


SUFFIX_FIELDS = (
    "suffix_records",
    "suffix_parent",
    "suffix_position",
    "suffix_reads_self",
    "suffix_kv_lo",
    "candidate_items",
)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    numbers=st.lists(st.integers(0, NUM_ITEMS - 1), min_size=2, max_size=MAX_EVENTS),
    grown=st.integers(0, 8),
    unknown=st.sets(st.integers(0, MAX_EVENTS), max_size=2),
    page_size=PAGE_SIZES,
    task=st.sampled_from(Task),
    is_open=st.booleans(),
)
def test_delta_is_prepared_as_the_whole_request_from_its_base_on(
    name, numbers, grown, unknown, page_size, task, is_open
):
    config, model = CASES[name], MODELS[name]
    numbers = [NUM_ITEMS if at in unknown else number for at, number in enumerate(numbers)]
    earlier = _request(config, numbers[: len(numbers) - grown], Task.PREFETCH)
    base = _base_of(model, earlier, page_size)
    if base == NO_BASE:
        return
    whole_request = _request(config, numbers, task, is_open=is_open)
    delta_request = _request(
        config,
        numbers,
        task,
        start=base.length,
        is_open=is_open,
        base_length=base.length,
        base_fingerprint=base.fingerprint,
    )
    whole_has_events = (
        task is not Task.RETRIEVE or np.less(numbers, NUM_ITEMS).any() or name == "unk"
    )
    assert whole_has_events, "a base has known events below it"
    whole = model.prepare(whole_request)
    whole_chain = HashChain.from_records(whole.records, whole.seed, page_size)
    try:
        delta = model.prepare(delta_request)
        chain = delta_chain(delta_request, delta, page_size)
    except HistoryNeeded:
        is_cut = whole.start_event > model.prepare(earlier).start_event
        is_unknown = name != "unk" and NUM_ITEMS in numbers[base.length :]
        assert is_cut or is_unknown, "only a moved start, or no known event, may ask for more"
        return
    if whole.start_event > model.prepare(earlier).start_event:
        # Rows now begin elsewhere: the boundary below the base is another one, with another hash.
        assert (
            chain.boundaries[chain.base_pages - 1] != whole_chain.boundaries[chain.base_pages - 1]
        )
        return
    base_rows = delta.base_rows
    assert base_rows == len(config.inputs.context) + config.inputs.tokens_per_event * (
        base.length - whole.start_event
    )
    np.testing.assert_array_equal(delta.records[base_rows:], whole.records[base_rows:], strict=True)
    assert not delta.records[:base_rows].any()
    for field in SUFFIX_FIELDS:
        np.testing.assert_array_equal(getattr(delta, field), getattr(whole, field), strict=True)
    for field in (
        "length", "seed", "num_events", "start_event", "num_known_events", "num_fixed_suffix",
        "read_row", "num_candidates", "chain_size",
    ):  # fmt: skip
        assert getattr(delta, field) == getattr(whole, field), field
    np.testing.assert_array_equal(
        chain.boundaries[chain.base_pages - 1 :], whole_chain.boundaries[chain.base_pages - 1 :]
    )
    assert chain.at(delta.length) == whole_chain.at(whole.length)
    again = next_base(delta, chain, model.spec)
    assert again == max(base, next_base(whole, whole_chain, model.spec))
