"""Entries without a model: what the scheduler needs of a request, in numbers."""

import numpy as np
import pytest
from core_harness import tiny_model

from engine.block_manager.user_state import UserKey
from engine.models.base import PreparedRequest
from engine.scheduler.cost import CostModel
from engine.scheduler.request import ScheduledRequest
from engine.scheduler.version import ServedVersion
from engine.types import Request, Reuse, Task


def prepared_request(length, candidates, fixed=0, chain_size=1, read_row=None):
    num_suffix = fixed + candidates
    return PreparedRequest(
        records=np.arange(length, dtype=np.int64).reshape(length, 1),
        seed=b"",
        num_events=length,
        start_event=0,
        num_known_events=length,
        suffix_records=np.zeros((num_suffix, 1), np.int64),
        suffix_parent=np.full(num_suffix, -1, np.int32),
        suffix_position=np.full(num_suffix, length, np.int32),
        suffix_reads_self=np.ones(num_suffix, bool),
        suffix_kv_lo=np.zeros(num_suffix, np.int32),
        num_fixed_suffix=fixed,
        read_row=read_row,
        num_candidates=candidates,
        chain_size=chain_size,
        candidate_items=np.arange(candidates, dtype=np.int64),
        excluded_rows=np.empty(0, np.int64),
    )


@pytest.fixture
def make_entry():
    numbers = iter(range(1, 1_000_000))
    model = tiny_model("append")
    versions = {
        name: ServedVersion(name=name, model=model, reuse=Reuse.APPEND, cost=CostModel(model.spec))
        for name in ("1", "2")
    }

    def make(
        user="u",
        *,
        length=10,
        candidates=4,
        arrival_s=0.0,
        priority=0,
        ageing_s=1.0,
        version="1",
        **cut,
    ):
        number = next(numbers)
        return ScheduledRequest(
            request=Request(request_id=f"r{number}", user_id=user, task=Task.RANK),
            version=versions[version],
            prepared=prepared_request(length, candidates, **cut),
            chain=None,
            key=UserKey("", user, version),
            sequence=number,
            admitted_s=arrival_s,
            order_s=arrival_s + priority * ageing_s,
        )

    return make
