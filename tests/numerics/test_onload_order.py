"""A layer's pages are read only after that layer's own onload."""

import time

import numpy as np
import pytest
from engine_models import CONFIGS

from engine.assembly import load_model
from engine.attention_backends.registry import attention_spec, create_backend
from engine.platforms.cpu import KvPools
from engine.request_builder import build_request
from engine.runner.runner import Runner
from engine.runner.step import PieceWork
from engine.testing.models import save_random_model
from engine.transfer.jobs import CopyJob, Direction
from engine.types import Task

PAGE_SIZE, LENGTH, PAGES = 4, 24, np.arange(6, dtype=np.int32)


class LateLayers:
    """A copy engine that brings a layer's bytes at the moment somebody waits for that layer."""

    def __init__(self, pools):
        self._pools = pools
        self.saved = [pools.raw(layer).clone() for layer in range(pools.num_layers)]

    def wait_layer(self, job, layer, deadline_s):
        self._pools.raw(layer).copy_(self.saved[layer])
        return True


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_a_layer_is_read_only_after_its_own_onload(tmp_path, name):
    save_random_model(tmp_path, CONFIGS["append"])
    model = load_model(str(tmp_path))
    pools = KvPools(model.spec, PAGE_SIZE, len(PAGES), 1, poison=True)
    backend = create_backend(name, attention_spec(model.spec, PAGE_SIZE))
    prepared = model.prepare(
        build_request(
            task=Task.RANK,
            user_id="ann",
            history={"item": np.arange(LENGTH) * 10 + 1},
            candidates={"item": np.array([11, 21, 31])},
        )
    )

    def run(start, stop, suffix, copies, onload):
        runner = Runner(model, backend, pools, copies, time.monotonic)
        work = PieceWork(
            prepared=prepared,
            start=start,
            stop=stop,
            suffix=np.arange(suffix),
            block_table=PAGES,
            onload=onload,
            task=Task.RANK,
            top_k=None,
            wants_user_embedding=False,
        )
        return runner.run([work], scratch=False, copy_deadline_s=np.inf).pieces[0]

    run(0, LENGTH, 0, None, None)
    expected = run(LENGTH, LENGTH, 3, None, None).scores
    copies = LateLayers(pools)
    pools.poison_pages(PAGES)
    onload = CopyJob(
        direction=Direction.ONLOAD,
        first_page=0,
        pages=PAGES,
        host_slots=PAGES,
        owner=None,
        branch=0,
    )
    result = run(LENGTH, LENGTH, 3, copies, onload)
    assert not result.copy_failed
    np.testing.assert_array_equal(result.scores, expected)
