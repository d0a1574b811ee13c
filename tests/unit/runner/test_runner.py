"""Steps of the runner: pieces, batches, onloads, heads."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from engine_models import CONFIGS

from engine.attention_backends.registry import attention_spec, create_backend
from engine.errors import ConfigError
from engine.models.hstu.model import HstuModel
from engine.platforms.cpu import KvPools
from engine.runner.runner import Runner
from engine.runner.step import PieceWork
from engine.testing.fakes import FakeClock, ManualCopyEngine
from engine.testing.models import random_tensors
from engine.transfer.jobs import CopyJob, Direction
from engine.types import Request, Task

PAGE = 4


class LayerCopies(ManualCopyEngine):
    """An onload that brings a layer's pages only when that layer is waited for.

    Args:
        saved: Per layer, the bytes of all pages as they were before they were lost.
        fails_at: The layer whose wait fails.
    """

    def __init__(self, pools, saved, fails_at=None, clock=None):
        super().__init__()
        self.waits = []
        self._pools, self._saved, self._fails_at = pools, saved, fails_at
        self._clock_to_advance = clock

    def wait_layer(self, job, layer, deadline_s):
        self.waits.append((job, layer, deadline_s))
        if self._clock_to_advance is not None:
            self._clock_to_advance.advance(0.25)
        if layer == self._fails_at:
            return False
        pages = torch.from_numpy(job.pages).long()
        self._pools.raw(layer)[pages] = self._saved[layer][pages]
        return True


class Bench:
    """A model with a pool; requests as pieces."""

    def __init__(self, name="append", backend="cpu", num_pages=64):
        self.model = HstuModel(CONFIGS[name], random_tensors(CONFIGS[name], seed=3))
        self.pools = KvPools(self.model.spec, PAGE, num_pages, 32, poison=True)
        self.clock = FakeClock()
        self.backend_name = backend
        self.runner = self.with_copies(ManualCopyEngine())

    def with_copies(self, copies):
        backend = create_backend(self.backend_name, attention_spec(self.model.spec, PAGE))
        return Runner(self.model, backend, self.pools, copies, self.clock)

    def run(self, *works, scratch=False):
        return self.runner.run(works, scratch=scratch, copy_deadline_s=5.0).pieces


def _items(*numbers):
    return np.array([10 * number + 1 for number in numbers], np.int64)


def _request(model, task=Task.RANK, events=11, candidates=6, seed=0, **fields):
    rng = np.random.default_rng(seed)
    history = {"item": _items(*rng.integers(0, 40, events))}
    inputs = model.config.inputs
    if inputs.tokens_per_event == 2:
        history["action"] = rng.integers(0, 6, events)
    has_time = model.spec.has_next_event_bias
    if has_time:
        history["time"] = np.cumsum(rng.integers(1, 5000, events))
    return model.prepare(
        Request(
            request_id="r",
            user_id="u",
            task=task,
            history=history,
            candidates={"item": _items(*range(candidates))} if task is Task.RANK else None,
            context=np.array([2]) if inputs.context else None,
            query_time=10_000_000 if has_time else None,
            **fields,
        )
    )


def _work(prepared, pages, start=0, stop=None, suffix=None, task=Task.RANK, **fields):
    stop = prepared.length if stop is None else stop
    everything = np.arange(prepared.suffix_length) if stop == prepared.length else np.arange(0)
    values = {"onload": None, "top_k": None, "wants_user_embedding": False, **fields}
    return PieceWork(
        prepared=prepared,
        start=start,
        stop=stop,
        suffix=everything if suffix is None else np.array(suffix, np.int64),
        block_table=np.array(pages, np.int32),
        task=task,
        **values,
    )


def _onload(pages):
    return CopyJob(
        direction=Direction.ONLOAD,
        first_page=0,
        pages=np.array(pages, np.int32),
        host_slots=np.arange(len(pages), dtype=np.int32),
        owner=None,
        branch=0,
    )


@pytest.mark.parametrize("backend", ["cpu", "reference", "torch"])
@pytest.mark.parametrize("name", ["append", "append_bf16", "window", "interleaved", "research"])
def test_rank_in_pieces_equals_rank_at_once(name, backend):
    bench = Bench(name, backend)
    prepared = _request(bench.model)
    [whole] = bench.run(_work(prepared, range(20, 29)))
    pages = (3, 11, 0, 7, 5, 9, 1)
    for start, stop in ((0, 3), (3, 4), (4, prepared.length - 1)):
        [part] = bench.run(_work(prepared, pages, start, stop))
        assert part.scores is None
    length, fixed = prepared.length, list(range(prepared.num_fixed_suffix))
    candidates = [fixed + [row + len(fixed) for row in rows] for rows in ((0, 1), (2, 3, 4, 5))]
    [first] = bench.run(_work(prepared, pages, length - 1, suffix=candidates[0]))
    [second] = bench.run(_work(prepared, pages, length, suffix=candidates[1]))
    assert whole.scores.shape == (6, 2)
    assert np.array_equal(np.concatenate((first.scores, second.scores)), whole.scores)
    assert np.isfinite(whole.scores).all()


@pytest.mark.parametrize("name", ["append", "append_bf16", "exact", "research"])
def test_batch_mates_do_not_change_a_result(name):
    bench = Bench(name)
    one, two = _request(bench.model, seed=1), _request(bench.model, events=3, seed=2)
    [alone] = bench.run(_work(one, range(10)))
    mates = bench.run(_work(two, (40, 41)), _work(one, range(10, 20)), _work(two, (50, 51)))
    assert np.array_equal(mates[1].scores, alone.scores)
    assert np.array_equal(mates[0].scores, mates[2].scores)


def test_empty_history_ranks_candidates():
    bench = Bench()
    prepared = _request(bench.model, events=0, candidates=2)
    [result] = bench.run(_work(prepared, ()))
    assert prepared.length == 0
    assert result.scores.shape == (2, 2)
    assert np.isfinite(result.scores).all()


@pytest.mark.parametrize("name", ["append", "research", "interleaved"])
def test_scratch_run_equals_a_run_in_pages_and_leaves_them_alone(name):
    bench = Bench(name)
    prepared = _request(bench.model)
    [paged] = bench.run(_work(prepared, range(10)))
    before = [bench.pools.raw(layer).clone() for layer in range(2)]
    [scratch] = bench.run(_work(prepared, range(20, 30)), scratch=True)
    assert np.array_equal(scratch.scores, paged.scores)
    assert all(torch.equal(bench.pools.raw(layer), before[layer]) for layer in range(2))


@pytest.mark.parametrize("name", ["append", "append_bf16", "research", "exact"])
def test_retrieve_after_a_hit_equals_retrieve_from_nothing(name):
    bench = Bench(name)
    prepared = _request(bench.model, Task.RETRIEVE)
    fields = {"task": Task.RETRIEVE, "top_k": 7, "wants_user_embedding": True}
    [cold] = bench.run(_work(prepared, range(10), **fields))
    [warm] = bench.run(_work(prepared, range(10), start=prepared.length, **fields))
    assert cold.items.shape == cold.item_scores.shape == (7,)
    assert cold.user_embedding.shape == (16,)
    assert cold.scores is None
    for name in ("items", "item_scores", "user_embedding"):
        assert np.array_equal(getattr(cold, name), getattr(warm, name))


def test_rank_with_user_embedding_gives_both():
    bench = Bench()
    prepared = _request(bench.model, return_user_embedding=True)
    retrieve = _request(bench.model, Task.RETRIEVE)
    [result] = bench.run(_work(prepared, range(10), wants_user_embedding=True))
    [alone] = bench.run(
        _work(retrieve, range(10, 20), task=Task.RETRIEVE, top_k=1, wants_user_embedding=True)
    )
    assert result.scores.shape == (6, 2)
    assert result.items is None
    assert np.array_equal(result.user_embedding, alone.user_embedding)


def test_user_embedding_is_left_out_unless_wanted():
    bench = Bench()
    prepared = _request(bench.model, Task.RETRIEVE)
    [result] = bench.run(_work(prepared, range(10), task=Task.RETRIEVE, top_k=3))
    assert result.user_embedding is None
    assert len(result.items) == 3


@pytest.mark.parametrize("backend", ["cpu", "reference", "torch"])
def test_each_layer_is_read_after_its_onload_only(backend):
    bench = Bench(backend=backend)
    prepared = _request(bench.model)
    [expected] = bench.run(_work(prepared, (0, 1, 2)))
    saved = [bench.pools.raw(layer).clone() for layer in range(2)]
    bench.pools.poison_pages(np.array([0, 1], np.int32))
    copies = LayerCopies(bench.pools, saved)
    bench.runner = bench.with_copies(copies)
    job = _onload((0, 1))
    [result] = bench.run(_work(prepared, (0, 1, 2), start=8, onload=job))
    assert [(layer, deadline) for _, layer, deadline in copies.waits] == [(0, 5.0), (1, 5.0)]
    assert np.array_equal(result.scores, expected.scores)
    assert not result.copy_failed


@pytest.mark.parametrize("backend", ["cpu", "reference", "torch"])
@pytest.mark.parametrize("fails_at", [0, 1])
@pytest.mark.parametrize("task", [Task.RANK, Task.RETRIEVE])
def test_failed_onload_spoils_its_own_piece_only(task, fails_at, backend):
    bench = Bench(backend=backend)
    lost, kept = _request(bench.model, task, seed=1), _request(bench.model, task, seed=2)
    fields = {"task": task, "top_k": 4 if task is Task.RETRIEVE else None}
    bench.run(_work(lost, (0, 1, 2), **fields))
    [expected] = bench.run(_work(kept, (3, 4, 5), **fields))
    saved = [bench.pools.raw(layer).clone() for layer in range(2)]
    bench.pools.poison_pages(np.array([0, 1], np.int32))
    copies = LayerCopies(bench.pools, saved, fails_at)
    bench.runner = bench.with_copies(copies)
    results = bench.run(
        _work(kept, (6, 7, 8), **fields),
        _work(lost, (0, 1, 2), start=8, onload=_onload((0, 1)), **fields),
        _work(kept, (3, 4, 5), start=5, **fields),
    )
    assert [result.copy_failed for result in results] == [False, True, False]
    assert results[1][:4] == (None, None, None, None)
    for result in (results[0], results[2]):
        for name in ("scores", "items", "item_scores"):
            assert np.array_equal(getattr(result, name), getattr(expected, name))
    # A job that was given up is not waited for again.
    assert [layer for _, layer, _ in copies.waits] == list(range(fails_at + 1))


def test_step_of_no_rows_waits_for_all_layers():
    bench = Bench()
    prepared = _request(bench.model, Task.PREFETCH)
    bench.run(_work(prepared, (0, 1, 2), task=Task.PREFETCH))
    saved = [bench.pools.raw(layer).clone() for layer in range(2)]
    copies = LayerCopies(bench.pools, saved, clock=bench.clock)
    runner = bench.with_copies(copies)
    job = _onload((0, 1))
    work = _work(
        prepared, (0, 1, 2), start=prepared.length, task=Task.PREFETCH, onload=job, suffix=()
    )
    result = runner.run([work], scratch=False, copy_deadline_s=5.0)
    assert [layer for _, layer, _ in copies.waits] == [0, 1]
    assert result.onload_wait_s == result.run_s == 0.5
    assert result.pieces[0].copy_failed is False


def test_step_of_no_rows_reports_a_failed_onload():
    bench = Bench()
    prepared = _request(bench.model, Task.PREFETCH)
    runner = bench.with_copies(LayerCopies(bench.pools, [], fails_at=0))
    work = _work(
        prepared, (0, 1, 2), start=prepared.length, task=Task.PREFETCH, onload=_onload((0,)),
        suffix=(),
    )  # fmt: skip
    [result] = runner.run([work], scratch=False, copy_deadline_s=5.0).pieces
    assert result.copy_failed


def test_prefetch_piece_gives_no_values():
    bench = Bench()
    prepared = _request(bench.model, Task.PREFETCH)
    [result] = bench.run(_work(prepared, (0, 1, 2), task=Task.PREFETCH))
    assert result[:4] == (None, None, None, None)


def test_backend_made_for_another_page_size_is_refused():
    bench = Bench()
    backend = create_backend("torch", attention_spec(bench.model.spec, PAGE + 1))
    with pytest.raises(ConfigError, match="was made for"):
        Runner(bench.model, backend, bench.pools, ManualCopyEngine(), bench.clock)


def test_scale_that_depends_on_the_batch_is_refused():
    bench = Bench()
    bench.model.spec = dataclasses.replace(bench.model.spec, scale=None)
    with pytest.raises(ConfigError, match=r"set layers\.scale_length"):
        bench.with_copies(ManualCopyEngine())
