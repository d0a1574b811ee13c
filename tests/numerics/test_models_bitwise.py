"""Row-wise functions of a model give a row the same bits in every company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention_backends.registry import attention_spec, create_backend
from engine.models.bitwise import BitwiseReport, check_bitwise
from engine.models.config import (
    ContextFeature,
    Feature,
    HstuLayers,
    Inputs,
    ModelConfig,
    RankHead,
    RetrieveHead,
)
from engine.models.hstu.model import HstuModel
from engine.models.linear import Linear, filled_rows
from engine.models.random_weights import builtin_model
from engine.models.silu import silu_
from engine.runner.layers import layer_program
from engine.testing.models import random_tensors

ROWS = 193
SUBSETS = [
    slice(0, 1),
    slice(192, 193),
    slice(5, 7),
    slice(64, 67),
    slice(3, 20),
    slice(0, 64),
    slice(31, 160),
    slice(0, 193, 2),
    torch.tensor([7, 7, 190, 0, 55]),
]

FAMILIES: list[dict[str, Any]] = [
    {"family": "meta"},
    {"family": "meta", "group_norm": True},
    {"family": "research"},
    {"family": "research", "concat_ua": True},
    {"family": "nvidia", "residual": False},
]


def tiny_model(dtype: str, hidden_size: int = 24, rank: str = "mlp", **layers: Any) -> HstuModel:
    """All kinds of inputs at once; sizes are no multiple of a vector."""
    config = ModelConfig(
        name="tiny",
        dtype=dtype,
        layers=HstuLayers(
            num_layers=2,
            hidden_size=hidden_size,
            num_heads=3,
            qk_dim=5,
            v_dim=7,
            scale_length=64,
            **{"family": "meta", **layers},
        ),
        inputs=Inputs(
            features=(
                Feature(name="item", num_rows=50),
                Feature(name="genre", num_rows=9, on="history"),
                Feature(name="price", dim=3),
                Feature(name="action", num_rows=4, on="history"),
            ),
            tokens_per_event=2,
            context=(ContextFeature(name="age", num_rows=6),),
            embedding_scale=True,
            positions="from_start",
            num_positions=40,
            max_history_events=30,
        ),
        rank=RankHead(kind="dot", norm="l2")
        if rank == "dot"
        else RankHead(kind="mlp", hidden=(13,), tasks=("a", "b", "c"), norm="layer_norm"),
        retrieve=RetrieveHead(norm="layer_norm"),
    )
    return HstuModel(config, random_tensors(config))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random_records(generator: torch.Generator) -> torch.Tensor:
    """Records of tiny_model [ROWS, 8] of every kind of row: item, genre, price x 3, action,
    context, position."""
    records = torch.empty(ROWS, 8, dtype=torch.int64)
    for column, (low, high) in {
        0: (-1, 50),
        1: (-1, 9),
        5: (-1, 4),
        6: (-1, 6),
        7: (0, 40),
    }.items():
        records[:, column] = torch.randint(low, high, (ROWS,), generator=generator)
    prices = torch.randn(ROWS, 3, generator=generator)
    records[:, 2:5] = prices.view(torch.int32).long()
    return records


@pytest.mark.parametrize("layers", FAMILIES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_give_a_row_the_same_bits_in_any_subset(
    dtype: str, layers: dict[str, Any], threads: int
) -> None:
    model = tiny_model(dtype, **layers)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 24, generator=generator).to(getattr(torch, dtype))
    attended = torch.randn(ROWS, 3, 7, generator=generator) * 0.1
    before = x.clone()
    whole = model.project(1, x)
    whole_out = model.output(1, x, whole.u, attended)
    assert torch.equal(x, before)
    for subset in SUBSETS:
        part = model.project(1, x[subset])
        for whole_tensor, part_tensor in zip(whole, part, strict=True):
            assert torch.equal(whole_tensor[subset], part_tensor)
        part_out = model.output(1, x[subset], whole.u[subset], attended[subset])
        assert torch.equal(whole_out[subset], part_out)


@pytest.mark.parametrize("rank", ["mlp", "dot"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_and_heads_give_a_row_the_same_bits_in_any_subset(
    dtype: str, rank: str, threads: int
) -> None:
    model = tiny_model(dtype, rank=rank)
    generator = torch.Generator().manual_seed(2)
    records = random_records(generator)
    x = model.embed(records)
    assert x.dtype == getattr(torch, dtype)
    candidates = records.clone()
    candidates[:, 0].clamp_(min=0)
    scores, users = model.rank(x, candidates), model.user_embedding(x)
    assert scores.dtype == users.dtype == torch.float32
    assert scores.shape == (ROWS, 3 if rank == "mlp" else 1)
    for subset in SUBSETS:
        assert torch.equal(model.embed(records[subset]), x[subset])
        assert torch.equal(model.rank(x[subset], candidates[subset]), scores[subset])
        assert torch.equal(model.user_embedding(x[subset]), users[subset])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_input_stage_has_the_bits_of_torch(dtype: str) -> None:
    model = tiny_model(dtype, hidden_size=37)
    records = random_records(torch.Generator().manual_seed(8))
    for rows in (records, records[::3], records[:1], records[:0]):
        assert torch.equal(model.embed(rows), model._embedding.embed_in_torch(rows))


def test_a_record_that_names_no_row_of_its_table_is_refused() -> None:
    model = tiny_model("float32")
    records = random_records(torch.Generator().manual_seed(8))
    records[100, 1] = 9
    with pytest.raises(RuntimeError, match="record 100 names row 9 of a table with 9"):
        model.embed(records)


def test_layers_of_no_rows_give_no_rows() -> None:
    model = tiny_model("float32")
    projected = model.project(0, torch.empty(0, 24))
    assert projected.k.shape == (0, 3, 5)
    assert model.output(0, torch.empty(0, 24), projected.u, torch.empty(0, 3, 7)).shape == (0, 24)


@pytest.mark.parametrize(("width_in", "width_out"), [(24, 80), (64, 1), (1040, 96), (13, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_gives_a_row_the_same_bits_in_any_subset(
    dtype: torch.dtype, width_in: int, width_out: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(width_in, width_out, generator=generator).to(dtype)
    bias = torch.randn(width_out, generator=generator).to(dtype)
    rows = torch.randn(ROWS, width_in, generator=generator).to(dtype)
    linear = Linear(weight, bias)
    whole = linear(rows)
    for subset in SUBSETS:
        assert torch.equal(linear(rows[subset]), whole[subset])
    expected = (rows.double() @ weight.double() + bias.double()).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(whole, expected, atol=tolerance * width_in**0.5, rtol=tolerance)


@pytest.mark.parametrize("width", [5, 16, 21, 96, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_gives_an_element_the_same_bits_in_any_company(
    dtype: torch.dtype, width: int, threads: int
) -> None:
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(4)).to(dtype) * 5
    x[0, 0], x[1, 0] = -200.0, 200.0
    whole = silu_(x.clone())
    for subset in SUBSETS:
        assert torch.equal(silu_(x[subset].clone().contiguous()), whole[subset])
    reference = (x.double() * torch.sigmoid(x.double())).to(dtype)
    torch.testing.assert_close(whole, reference)


def test_linears_meet_few_numbers_of_rows() -> None:
    for count in range(1, 20_000):
        filled = filled_rows(count)
        assert max(2, count) <= filled <= max(2, count * 1.125)
        assert filled_rows(filled) == filled
    assert len({filled_rows(count) for count in range(1, 8193)}) < 90


def test_silu_does_not_depend_on_threads() -> None:
    x = torch.randn(99_991, generator=torch.Generator().manual_seed(5))
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(silu_(x.clone()))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def self_check(model: HstuModel, backend_name: str) -> BitwiseReport:
    backend = create_backend(backend_name, attention_spec(model.spec, 16))
    return check_bitwise(model, layer_program(model, backend), 16)


@pytest.mark.parametrize("layers", FAMILIES, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_self_check_says_bitwise(dtype: str, backend: str, layers: dict[str, Any]) -> None:
    report = self_check(tiny_model(dtype, **layers), backend)
    assert report == (True, 0.0)
    assert str(report) == "bitwise"


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_self_check_of_the_builtin_model_says_bitwise(backend: str) -> None:
    assert self_check(builtin_model(), backend).is_bitwise


def test_self_check_reports_the_difference_of_a_model_that_depends_on_company() -> None:
    class Drifting(HstuModel):
        def output(
            self, layer: int, x: torch.Tensor, u: torch.Tensor, attended: torch.Tensor
        ) -> torch.Tensor:
            out = super().output(layer, x, u, attended)
            return out if layer == 0 else x + len(x) * 0.25

    model = tiny_model("float32")
    drifting = Drifting(model.config, random_tensors(model.config))
    report = self_check(drifting, "torch")
    assert not report.is_bitwise
    np.testing.assert_allclose(report.max_difference, 130 * 0.25, rtol=1e-3)
    assert "rows differ by up to 32.5" in str(report)
