"""Native operators can be traced."""

from __future__ import annotations

import pytest
import torch

from engine.native_library import load_library

WITHOUT_TENSORS = ("engine::cpu_isa", "engine::machine_isas")
CHECKS = ("test_schema", "test_faketensor")


@pytest.fixture(autouse=True)
def _library():
    assert load_library() is None


def test_every_operator_on_tensors_has_a_fake():
    names = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("engine::") and not name.startswith("engine::copy_")
    ]
    assert len(names) >= 9
    missing = [
        name
        for name in names
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")
        and name not in WITHOUT_TENSORS
    ]
    assert missing == []


def test_operators_that_write_into_their_arguments_can_be_traced():
    pages = torch.zeros(3, 4, 2, 5), torch.zeros(3, 4, 2, 6)
    rows = torch.randn(2, 2, 5), torch.randn(2, 2, 6)
    slots = torch.tensor([1, 9])
    torch.library.opcheck(
        torch.ops.engine.append_kv.default, (*rows, slots, *pages), test_utils=CHECKS
    )
    records = torch.tensor([[0, 1], [2, -1]])
    tables = [torch.randn(3, 4), torch.randn(2, 4)]
    torch.library.opcheck(
        torch.ops.engine.embed.default,
        (records, tables, [0, 1], [0, 0], [0, 0], 1, 2.0, torch.empty(2, 4)),
        test_utils=CHECKS,
    )
    half = [torch.randn(4), torch.randn(4), torch.randn(10, 4), torch.randn(10)]
    torch.library.opcheck(
        torch.ops.engine.hstu_project.default,
        (torch.randn(3, 4), half, False, 1e-6, 10, torch.empty(3, 10)),
        test_utils=CHECKS,
    )

    items, ids = torch.randn(20, 4), torch.arange(20)
    found = torch.empty(5, dtype=torch.int64), torch.empty(5), torch.empty(1, dtype=torch.int64)
    torch.library.opcheck(
        torch.ops.engine.top_items.default,
        (torch.randn(4), items, None, ids, ids[:3], *found),
        test_utils=CHECKS,
    )
