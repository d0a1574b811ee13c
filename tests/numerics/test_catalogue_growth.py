"""More items, the same weights: kept state stays exact across the growth."""

import msgspec
import numpy as np
import pytest
import torch
from engine_models import CONFIGS, NUM_ITEMS

from engine.assembly import Hooks, build_core
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.models.base import ItemCatalogue
from engine.models.hstu.model import HstuModel
from engine.testing.models import random_tensors

OLD = [10 * row + 1 for row in range(NUM_ITEMS)]
NEW = [5001, 5002]
HISTORY = OLD[3:30]


def features(config, items):
    history = {"item": np.array(items, np.int64)}
    if config.inputs.tokens_per_event == 2:
        history["action"] = np.array(items, np.int64) % 6
    return history


class Growing:
    """An engine whose model takes a larger catalogue while its state is kept, and what a new
    engine with that model recomputes."""

    def __init__(self, name, dtype="float32"):
        self.config = msgspec.structs.replace(CONFIGS[name], dtype=dtype)
        self.tensors = random_tensors(self.config)
        self.model = HstuModel(self.config, self.tensors)
        self.cached = self._engine(self.model, "tiered")

    def _engine(self, model, tiers):
        config = EngineConfig(
            cache=CacheConfig(
                tiers=tiers,
                page_size=4,
                chunk_size=8,
                device_pages=64,
                host_bytes=1 << 20,
                poison=True,
            ),
            check_invariants=True,
        )
        return Engine(build_core(model, config, Hooks(uses_device_thread=False)))

    def grow(self):
        table = self.tensors["embeddings.item"]
        rows = torch.randn(len(NEW), table.shape[1], generator=torch.Generator().manual_seed(7))
        grown = self.model.with_catalogue(
            ItemCatalogue(
                settings=msgspec.structs.replace(self.config.catalogue, version="2"),
                item_ids=np.array([*OLD, *NEW]),
                table=torch.cat([table, rows]),
            )
        )
        # No step is running: from here on the engine's model is the grown one.
        vars(self.model).update(vars(grown))

    def ask(self, items, *, top_k=None, **options):
        """Usage of the cached engine; its answer has the bits of a recompute."""
        asked = {"user_id": "ann", "history": features(self.config, items), **options}
        if self.config.inputs.context:
            asked["context"] = [1]
        fresh = self._engine(self.model, "off")
        if top_k is None:
            asked["candidates"] = {"item": [1, 11, *asked.pop("more", [21, 31])]}
            got, want = self.cached.rank(**asked), fresh.rank(**asked)
            np.testing.assert_array_equal(got.scores, want.scores, strict=True)
        else:
            asked["top_k"] = top_k
            got, want = self.cached.retrieve(**asked), fresh.retrieve(**asked)
            np.testing.assert_array_equal(got.items, want.items, strict=True)
            np.testing.assert_array_equal(got.item_scores, want.item_scores, strict=True)
        fresh.close()
        return got


@pytest.fixture
def growing():
    made = []

    def make(*arguments):
        made.append(Growing(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.cached.close()


@pytest.mark.parametrize(
    ("name", "dtype"), [("append", "float32"), ("append", "bfloat16"), ("interleaved", "float32")]
)
def test_history_of_old_items_is_a_full_hit_after_the_growth(growing, name, dtype):
    both = growing(name, dtype)
    length = both.ask(HISTORY).usage.history_length
    both.grow()
    usage = both.ask(HISTORY).usage
    assert (usage.device_tokens, usage.computed_tokens) == (length, 0)
    usage = both.ask([*HISTORY, *NEW], more=NEW).usage
    assert usage.device_tokens == length
    assert usage.history_length == length + 2 * both.config.inputs.tokens_per_event


def test_new_items_are_retrieved_after_the_growth(growing):
    both = growing("append")
    before = both.ask(HISTORY, top_k=NUM_ITEMS + 2)
    assert not set(NEW) & set(before.items.tolist())
    both.grow()
    after = both.ask(HISTORY, top_k=NUM_ITEMS + 2)
    assert set(after.items.tolist()) == {*OLD, *NEW}
    assert after.usage.computed_tokens == 0
    scores = dict(zip(after.items.tolist(), after.item_scores.tolist(), strict=True))
    assert [scores[item] for item in before.items.tolist()] == before.item_scores.tolist()


def test_item_that_was_unknown_makes_the_state_diverge_where_it_stands(growing):
    both = growing("append")
    history = [*HISTORY[:10], NEW[0], *HISTORY[10:]]
    assert both.ask(history).usage.history_length == 27, "the unknown item is dropped"
    both.grow()
    usage = both.ask(history).usage
    assert usage.history_length == 28
    assert usage.device_tokens == 8, "two pages before it"


def test_delta_across_the_growth_is_that_of_the_whole_history(growing):
    both = growing("append")
    history = [*HISTORY[:10], NEW[0], *HISTORY[10:]]
    base = both.ask(history).usage
    assert base.base_length == 8, "before the item that is not known yet"
    both.grow()
    delta = both.cached.rank(
        user_id="ann",
        history=history[8:],
        candidates=[1, 11],
        base_length=base.base_length,
        base_fingerprint=base.fingerprint,
    )
    whole = both.cached.rank(user_id="bob", history=history, candidates=[1, 11])
    assert delta.usage.history_length == 28
    np.testing.assert_array_equal(delta.scores, whole.scores, strict=True)
