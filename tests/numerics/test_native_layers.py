"""All layers in native code against the same in torch, for every family."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from engine.attention_backends.base import AttentionBatch
from engine.attention_backends.registry import attention_spec, create_backend
from engine.models import linear
from engine.models.config import Feature, HstuLayers, Inputs, ModelConfig, RankHead
from engine.models.hstu.model import HstuModel
from engine.native_library import cpu_isa, load_library, machine_isas
from engine.platforms.cpu import KvPools
from engine.runner.batch import PieceBias, PieceRows, assemble
from engine.runner.layers import LayerPages, layer_program
from engine.testing.models import random_tensors

PAGE = 8
NUMERICS = Path(__file__).parent
UNIT_TESTS = NUMERICS.parent / "unit/models"
FAMILIES: list[dict[str, Any]] = [
    {"family": "meta"},
    {"family": "meta", "group_norm": True},
    {"family": "research"},
    {"family": "research", "concat_ua": True, "relative_bias": True},
    {"family": "nvidia"},
    {"family": "nvidia", "residual": False, "norm_eps": 1e-3},
]


def model_of(dtype: str, layers: dict[str, Any]) -> HstuModel:
    """Widths that are no multiple of a vector, qk_dim and v_dim apart."""
    config = ModelConfig(
        name="tiny",
        dtype=dtype,
        layers=HstuLayers(
            num_layers=3,
            hidden_size=27,
            num_heads=3,
            qk_dim=5,
            v_dim=9,
            scale_length=2048,
            **layers,
        ),
        inputs=Inputs(features=(Feature(name="item", num_rows=50),), max_history_events=2000),
        rank=RankHead(kind="mlp"),
    )
    # The values of both dtypes are the same: those that bfloat16 has.
    tensors = random_tensors(config)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.bfloat16().float()
    return HstuModel(config, tensors)


def step(model: HstuModel, pools: KvPools, pieces: list[tuple[int, int, int]]) -> AttentionBatch:
    """Users with `start` rows in their pages, rows [start, stop) and suffix rows. The second of
    two suffix rows reads the first."""
    rng = np.random.default_rng(len(pieces))
    free = rng.permutation(pools.num_pages).astype(np.int32)
    rows = []
    for start, stop, suffix in pieces:
        count = -(-stop // PAGE)
        table, free = free[:count], free[count:]
        num_rows = stop - start + suffix
        position = np.concatenate([np.arange(start, stop), np.full(suffix, stop)])
        times = np.sort(rng.integers(0, 10**7, stop + suffix))
        bias = PieceBias(
            row_position=position,
            row_next_time=times[-num_rows:] if num_rows else times[:0],
            key_time=times[:stop],
            suffix_time=times[stop:],
            suffix_position=position[stop - start :],
        )
        rows.append(
            PieceRows(
                start=start,
                stop=stop,
                suffix=np.arange(suffix),
                suffix_parent=np.where(np.arange(suffix) % 2, np.arange(suffix) - 1, -1).astype(
                    np.int32
                ),
                suffix_reads_self=np.arange(suffix) != 2,
                kv_lo=np.maximum(position - 700, 0).astype(np.int32),
                kv_hi=np.minimum(position + 1, stop).astype(np.int32),
                block_table=table,
                bias=bias if model.spec.bias else None,
            )
        )
    return assemble(rows, PAGE, pools.null_page)


def pools_of(model: HstuModel) -> KvPools:
    """Pages whose kept rows are random, the same ones every time."""
    pools = KvPools(model.spec, PAGE, 600, 1, poison=True)
    generator = torch.Generator().manual_seed(5)
    for layer in range(model.spec.num_layers):
        for views in pools.layer(layer):
            views[:-1] = (torch.randn(views[:-1].shape, generator=generator) * 0.3).bfloat16()
    return pools


STEPS = {
    "one_row": [(0, 1, 0)],
    "one_candidate": [(9, 9, 1)],
    "prefetch_only": [(8, 30, 0), (0, 5, 0)],
    "suffix_chains": [(0, 40, 6), (17, 17, 3), (3, 4, 0)],
    "several_blocks": [(0, 1500, 7), (100, 700, 20)],
}


class Ran(NamedTuple):
    """A step's rows, and all pages after it."""

    x: torch.Tensor
    pages: list[torch.Tensor]


def run(model: HstuModel, backend: str, pieces: list[tuple[int, int, int]]) -> Ran:
    """A step of random rows; `cpu` runs natively, `torch` layer after layer."""
    pools = pools_of(model)
    batch = step(model, pools, pieces)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(len(batch.kv_lo), 27, generator=generator).bfloat16()
    x = x.to(getattr(torch, model.spec.dtype))
    before = x.clone()
    run_layers = layer_program(model, create_backend(backend, attention_spec(model.spec, PAGE)))
    found = run_layers(x, batch, LayerPages(pools, None))
    assert torch.equal(x, before)
    assert found.dtype == x.dtype
    layers = range(model.spec.num_layers)
    return Ran(found, [views for layer in layers for views in pools.layer(layer)])


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("layers", FAMILIES, ids=str)
@torch.inference_mode()
def test_native_layers_give_what_torch_gives(layers: dict[str, Any], name: str) -> None:
    model = model_of("float32", layers)
    found, twin = (run(model, backend, STEPS[name]) for backend in ("cpu", "torch"))
    for mine, other in zip([found.x, *found.pages], [twin.x, *twin.pages], strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("layers", FAMILIES, ids=str)
@torch.inference_mode()
def test_native_bfloat16_is_as_near_to_float32_as_torch(layers: dict[str, Any], name: str) -> None:
    exact = run(model_of("float32", layers), "torch", STEPS[name])
    model = model_of("bfloat16", layers)
    found, twin = (run(model, backend, STEPS[name]) for backend in ("cpu", "torch"))
    errors = [float((ran.x.float() - exact.x).abs().mean()) for ran in (found, twin)]
    assert errors[0] <= 1.1 * errors[1] + 1e-3
    for mine, other in zip(found.pages, exact.pages, strict=True):
        torch.testing.assert_close(mine.float(), other, atol=0.2, rtol=0.0, equal_nan=True)


@pytest.mark.parametrize("layers", FAMILIES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_layers_that_onednn_cannot_pack_go_through_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: str, layers: dict[str, Any]
) -> None:
    packed = run(model_of("float32", layers), "cpu", STEPS["suffix_chains"])
    monkeypatch.setattr(linear, "has_prepacked", lambda dtype: False)
    plain = run(model_of(dtype, layers), "cpu", STEPS["suffix_chains"])
    difference = float((plain.x.float() - packed.x).abs().mean())
    assert difference < (1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_a_step_without_rows_gives_none(dtype: str) -> None:
    model = model_of(dtype, {"family": "meta"})
    pools = pools_of(model)
    run_layers = layer_program(model, create_backend("cpu", attention_spec(model.spec, PAGE)))
    x = torch.empty(0, 27, dtype=getattr(torch, dtype))
    found = run_layers(x, step(model, pools, [(8, 8, 0)]), LayerPages(pools, None))
    assert found.shape == (0, 27)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_a_users_rows_have_the_same_bits_in_every_step(dtype: str, threads: int) -> None:
    model = model_of(dtype, {"family": "meta"})
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1507, 27, generator=generator).to(getattr(torch, dtype))
    run_layers = layer_program(model, create_backend("cpu", attention_spec(model.spec, PAGE)))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)

    def rows(pieces: list[tuple[int, int, int]], x: torch.Tensor) -> torch.Tensor:
        pools = pools_of(model)
        return run_layers(x, step(model, pools, pieces), LayerPages(pools, None))

    whole = rows([(0, 1500, 7)], x)
    others = torch.randn(600, 27, generator=generator).to(x.dtype)
    beside = rows([(0, 600, 0), (0, 1500, 7)], torch.cat([others, x]))
    torch.set_num_threads(before)
    assert torch.equal(beside[600:], whole)


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512_bf16"])
def test_other_instruction_sets_pass_too(isa: str) -> None:
    if "ENGINE_CPU_ISA" in os.environ:
        pytest.skip("this is the run with another instruction set")
    assert load_library() is None
    if cpu_isa() == isa:
        pytest.skip("the other tests use it")
    if isa not in machine_isas():
        pytest.skip(f"this machine has no {isa}")
    tests = [__file__, f"{UNIT_TESTS}/test_item_search.py", f"{NUMERICS}/test_models_bitwise.py"]
    chosen = "suffix_chains or every_step or cannot_pack or item_search or native_input_stage"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-k", chosen, *tests],
        env={**os.environ, "ENGINE_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
