"""The conformance suite on the built-in backends, and that the suite finds broken ones."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from engine.assembly import build_core
from engine.attention_backends.base import Partial
from engine.attention_backends.reference import ReferenceBackend
from engine.attention_backends.torch_tiles import TorchBackend
from engine.config import AttentionConfig, CacheConfig, EngineConfig
from engine.models.random_weights import builtin_model
from engine.testing.attention import CASES, check_backend, check_case

_SMALL = [case for case in CASES if case.page_size == 7]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference", "torch"])
def test_backend_conforms(backend, case):
    results = check_case(backend, case)
    assert not [str(result) for result in results if not result.passed]
    assert {result.check for result in results} == {
        "dense", "order", "alone", "pieces", "block order", "page size 1", "page size 16",
        "page size 48", "1 threads", "2 threads", "3 threads",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("v_dim", [1, 5, 6, 7, 9, 10, 11, 33, 64])
def test_torch_rows_do_not_depend_on_their_place_in_a_tile(v_dim, dtype):
    spec = replace(CASES[0].spec, qk_dim=v_dim, v_dim=v_dim, dtype=dtype)
    assert TorchBackend(spec).row_difference() == 0.0


class Drifts(TorchBackend):
    """Its products depend on where a row stands."""

    def _accumulate(self, acc, weights, v):
        super()._accumulate(acc, weights, v)
        acc[:, 0] += 0.5


class OneKeyShort(ReferenceBackend):
    """Sees one key less than it should."""

    def prepare(self, batch):
        object.__setattr__(batch, "kv_hi", batch.kv_hi - 1)
        super().prepare(batch)


class ReadsAhead(ReferenceBackend):
    """Sees one key more: a slot that may hold NaN."""

    def prepare(self, batch):
        end = batch.block_table.shape[1] * self.spec.page_size
        object.__setattr__(batch, "kv_hi", (batch.kv_hi + 1).clamp(max=end))
        super().prepare(batch)


class MixesRows(ReferenceBackend):
    """Right to rounding, but a row's bits depend on the other rows."""

    def attend(self, pages, q, bias=None):
        partial = super().attend(pages, q, bias)
        noise = q.float().sum().sin() * 1e-6
        return Partial(partial.out * (1 + noise), partial.lse)


class WritesElsewhere(ReferenceBackend):
    """Touches a slot that it was not given."""

    def append(self, pages, k, v):
        super().append(pages, k, v)
        pages.v[0] = 0.0


class OnlyFloat32(ReferenceBackend):
    """Serves less than the suite asks."""

    dtypes = (torch.float32,)
    scores = ("silu",)
    biases = ()


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Registers this module's classes by their names, as an installed distribution would."""
    name = "broken_attention_backends"
    module = type(sys)(name)
    lines = ["[engine.attention_backends]"]
    for backend in (OneKeyShort, ReadsAhead, MixesRows, WritesElsewhere, OnlyFloat32, Drifts):
        setattr(module, backend.__name__, lambda backend=backend: backend)
        lines.append(f"{backend.__name__} = {name}:{backend.__name__}")
    monkeypatch.setitem(sys.modules, name, module)
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("plug_in")
@pytest.mark.parametrize(
    ("backend", "says"), [("torch", "bitwise"), ("Drifts", "not bitwise: rows differ by up to 0.5")]
)
def test_engine_says_at_start_whether_rows_depend_on_their_place(backend, says):
    config = EngineConfig(
        cache=CacheConfig(device_pages=2, host_bytes=0, allow_small_pool=True),
        attention=AttentionConfig(backend=backend),
        warm_up=False,
    )
    core = build_core(builtin_model(), config)
    core.close()
    assert core.info.exactness == says


@pytest.mark.usefixtures("plug_in")
@pytest.mark.parametrize(
    ("backend", "check"),
    [("OneKeyShort", "dense"), ("ReadsAhead", "dense"), ("MixesRows", "alone")],
)
def test_suite_finds_a_broken_backend(backend, check):
    results = check_backend(backend, cases=_SMALL)
    assert any(result.check == check and not result.passed for result in results)


@pytest.mark.usefixtures("plug_in")
def test_suite_finds_a_write_to_another_slot():
    with pytest.raises(AssertionError, match="wrote to other slots"):
        check_backend("WritesElsewhere", cases=_SMALL)


@pytest.mark.usefixtures("plug_in")
def test_suite_leaves_out_what_a_backend_does_not_serve():
    results = check_backend("OnlyFloat32", cases=CASES[-12:] + CASES[:1])
    assert {result.case for result in results} == {CASES[0]}
    assert all(result.passed for result in results)
