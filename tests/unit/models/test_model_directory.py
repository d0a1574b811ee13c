"""Writing, reading and refusing model directories."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.models.config import (
    Feature,
    HstuLayers,
    Inputs,
    ModelConfig,
    RankHead,
    RetrieveHead,
)
from engine.models.loader import load_model_dir, save_model_dir
from engine.models.random_weights import builtin_model
from engine.testing.models import random_tensors
from engine.types import Request, Task

FILES = ("config.json", "model.safetensors")


def small_config(**changes: Any) -> ModelConfig:
    return ModelConfig(
        **{
            "name": "small",
            "layers": HstuLayers(
                family="meta",
                num_layers=2,
                hidden_size=8,
                num_heads=2,
                qk_dim=3,
                v_dim=5,
                scale_length=16,
            ),
            "inputs": Inputs(
                features=(Feature(name="item", num_rows=9),),
                positions="from_start",
                num_positions=5,
                max_history_events=4,
            ),
            "rank": RankHead(kind="mlp", hidden=(6,), tasks=("click", "buy")),
            "retrieve": RetrieveHead(norm="layer_norm"),
            **changes,
        }
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_model_dir(tmp_path / "model", small_config(), random_tensors(small_config()))
    return tmp_path / "model"


def edit_config(directory: Path, *path: str, value: Any) -> None:
    """Set one key of config.json."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    section = config
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_loads_and_scores_as_the_one_in_memory(tmp_path: Path, dtype: str) -> None:
    from engine.models.hstu.model import HstuModel

    config = small_config(dtype=dtype)
    tensors = random_tensors(config)
    in_memory = HstuModel(config, tensors)
    save_model_dir(tmp_path, config, tensors)
    loaded = load_model_dir(tmp_path)
    assert loaded.spec == in_memory.spec
    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    records = torch.zeros(7, 2, dtype=torch.int64)
    for one, two in zip(in_memory.project(1, x), loaded.project(1, x), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(in_memory.rank(x, records), loaded.rank(x, records))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_both_files_get_the_mode_that_the_umask_gives(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        save_model_dir(tmp_path, small_config(), random_tensors(small_config()))
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in FILES]
    assert modes == [mode, mode]


def test_weights_version_may_be_given_at_load(directory: Path) -> None:
    request = Request(
        request_id="r", user_id="u", task=Task.PREFETCH, history={"item": np.array([1, 11])}
    )
    own, given = load_model_dir(directory), load_model_dir(directory, "2026-12-01")
    again = load_model_dir(directory, "1")
    assert (own.spec.weights_version, given.spec.weights_version) == ("1", "2026-12-01")
    assert given.prepare(request).seed != own.prepare(request).seed
    assert again.prepare(request).seed == own.prepare(request).seed


@pytest.mark.parametrize("version", ["", "a/b"])
def test_wrong_weights_version_at_load_is_refused(directory: Path, version: str) -> None:
    with pytest.raises(ConfigError, match=f"weights_version is '{version}'"):
        load_model_dir(directory, version)


def test_spec_and_face_of_a_loaded_model(directory: Path) -> None:
    model = load_model_dir(directory)
    spec = model.spec
    assert (spec.name, spec.num_layers, spec.qk_dim, spec.v_dim) == ("small", 2, 3, 5)
    assert spec.scale == 1 / 16
    assert spec.alpha == 3**-0.5
    assert spec.max_history_tokens == 4
    assert set(spec.tasks) == {Task.RANK, Task.RETRIEVE, Task.PREFETCH}
    # A layer multiplies 8 x 2(2*5 + 2*3) and 3*2*5 x 8 weights.
    assert spec.flops_per_token == 2 * 2 * (8 * 32 + 30 * 8)
    face = model.describe()
    assert face.score_names == ("click", "buy")
    assert face.embedding_dim == 8
    assert not face.reads_query_time
    assert [feature.name for feature in face.features] == ["item"]
    assert face.sample_items[:3] == (1, 11, 21)


def test_sample_items_are_spread_over_a_large_catalogue() -> None:
    sample = builtin_model().describe().sample_items  # of ids 0 to 9999
    assert len(sample) == 64
    assert sample[:3] == (0, 156, 312)
    assert sample[-1] == 9843


def test_ids_of_the_catalogue_are_mapped(directory: Path) -> None:
    # random_tensors gives row k the id 10 * k + 1.
    prepared = load_model_dir(directory).prepare(
        Request(
            request_id="r",
            user_id="u",
            task=Task.RANK,
            history={"item": np.array([21, 1])},
            candidates={"item": np.array([81])},
        )
    )
    assert prepared.records.tolist() == [[2, 0], [0, 1]]
    assert prepared.suffix_records.tolist() == [[8, 2]]


def test_all_tensors_that_do_not_fit_are_listed_with_their_shapes(directory: Path) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["layers.1.attn_norm.bias"]
    tensors["layers.0.uvqk.weight"] = tensors["layers.0.uvqk.weight"].t().contiguous()
    tensors["layers.2.uvqk.bias"] = torch.zeros(32)
    tensors["positions.weight"] = torch.zeros(5, 8, dtype=torch.int32)
    tensors["catalogue.item_ids"] = tensors["catalogue.item_ids"].int()
    save_file(tensors, file)
    with pytest.raises(ConfigError) as caught:
        load_model_dir(directory)
    message = caught.value.message
    assert message.startswith(str(directory))
    for part in (
        "layers.1.attn_norm.bias [10] is missing",
        "layers.0.uvqk.weight is [32, 8], expected [8, 32]",
        "layers.2.uvqk.bias [32] is surplus",
        "positions.weight is int32, expected a float type",
        "catalogue.item_ids is int32, expected int64",
    ):
        assert part in message


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e300])
def test_weights_that_give_no_numbers_are_refused(tmp_path: Path, value: float) -> None:
    tensors = random_tensors(small_config())
    weight = tensors["layers.1.uvqk.weight"].double()
    weight[3, 2] = value
    tensors["layers.1.uvqk.weight"] = weight
    with pytest.raises(ConfigError, match=r"layers\.1\.uvqk\.weight holds NaN, infinity"):
        save_model_dir(tmp_path / "model", small_config(), tensors)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 3, 2], "holds id 2 more than once"),
        ([], "is empty"),
        ([1, -2], "holds the negative id -2"),
        (list(range(10)), "has 10 items from row 0 on, but embeddings.item has 9 rows"),
    ],
)
def test_catalogues_that_do_not_fit_are_refused(
    tmp_path: Path, ids: list[int], message: str
) -> None:
    tensors = random_tensors(small_config())
    tensors["catalogue.item_ids"] = torch.tensor(ids, dtype=torch.int64)
    with pytest.raises(ConfigError, match=message):
        save_model_dir(tmp_path / "model", small_config(), tensors)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("colour",), 1, r"config\.json: .*unknown field `colour`"),
        (("layers", "depth"), 1, r"unknown field `depth` - at `\$\.layers`"),
        (("layers", "num_heads"), "two", r"Expected `int`, got `str` - at `\$\.layers\.num_heads`"),
        (("layers", "num_heads"), 0, r"layers\.num_heads is 0"),
        (("layers", "num_layers"), 10**9, r"layers\.num_layers is 1000000000: give at most"),
        (("layers", "alpha"), float("nan"), r"layers\.alpha is nan: give a finite number"),
        (("layers", "norm_eps"), 0.0, r"layers\.norm_eps is 0\.0: give a finite number above 0"),
        (("layers", "window"), 1 << 31, r"layers\.window is 2147483648: give 0 \(off\) to"),
        (("rank", "norm_eps"), -1.0, r"rank\.norm_eps is -1\.0"),
        (("retrieve", "norm_eps"), float("inf"), r"retrieve\.norm_eps is inf"),
        (("name",), "a/b", r"name is 'a/b': give a text without /"),
        (("weights_version",), "", r"weights_version is '': give a text without /"),
        (("weights_version",), "a\n", r"weights_version is 'a\\n': give at most 256 printable"),
        (
            ("weights_version",),
            "\ud800",
            r"weights_version is '\\ud800': give at most 256 printable",
        ),
        (("name",), "n" * 257, r"name is 'n+: give at most 256 printable"),
        (("layers", "family"), "google", r"\$\.layers\.family"),
        (("layers", "architecture"), "mamba", r"'mamba', known are: hstu"),
        (("layers", "group_norm"), 1, r"Expected `bool`"),
        (("format_version",), 2, r"\$\.format_version"),
        (("inputs", "num_positions"), 0, r"inputs\.positions 'from_start'"),
        (("inputs", "max_history_events"), 0, r"max_history_events must be at least 1"),
        (("rank", "tasks"), [], r"rank\.tasks is empty"),
        (("catalogue", "unk_row"), 9, r"catalogue\.unk_row is 9: item has 9 rows"),
    ],
)
def test_config_errors_name_the_file_and_the_key(
    directory: Path, path: tuple[str, ...], value: Any, message: str
) -> None:
    edit_config(directory, *path, value=value)
    with pytest.raises(ConfigError, match=message) as caught:
        load_model_dir(directory)
    if "mamba" not in message:
        assert caught.value.message.startswith(str(directory / "config.json"))


def test_a_model_without_heads_is_refused(tmp_path: Path) -> None:
    config = small_config(rank=None, retrieve=None)
    save_model_dir(tmp_path, config, random_tensors(config))
    with pytest.raises(ConfigError, match="neither a rank nor a retrieve head"):
        load_model_dir(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_and_broken_files_are_named(directory: Path, name: str) -> None:
    (directory / name).write_bytes(b"\x00broken")
    with pytest.raises(ConfigError, match=f"{name} cannot be read"):
        load_model_dir(directory)
    (directory / name).write_bytes(b"[" * 100_000)
    with pytest.raises(ConfigError, match=f"{name} cannot be read"):
        load_model_dir(directory)
    (directory / name).unlink()
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        load_model_dir(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"combine": "concat"}, r"widths .* add up to 16, not to hidden_size 8"),
        (
            {"features": (Feature(name="item", num_rows=3, width=4),)},
            r"widths .* must all be hidden_size 8",
        ),
        ({"tokens_per_event": 2}, r"declare a feature `action`"),
    ],
)
def test_inputs_that_do_not_fit_together_are_refused(changes: dict[str, Any], message: str) -> None:
    features = (Feature(name="item", num_rows=3), Feature(name="price", dim=2))
    with pytest.raises(ConfigError, match=message):
        small_config(inputs=Inputs(**{"features": features, "max_history_events": 4, **changes}))


def test_a_dot_head_needs_item_rows_as_wide_as_the_model() -> None:
    features = (
        Feature(name="item", num_rows=3, width=6),
        Feature(name="price", dim=2, width=2),
    )
    inputs = Inputs(features=features, combine="concat", max_history_events=4)
    assert small_config(inputs=inputs, retrieve=None).inputs.combine == "concat"
    with pytest.raises(ConfigError, match="'item': width is 6"):
        small_config(inputs=inputs)
