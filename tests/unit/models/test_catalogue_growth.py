"""A new item table may add items and change nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_models import CONFIGS, NUM_ITEMS
from safetensors.torch import save_file

from engine.errors import ConfigError
from engine.models.base import ItemCatalogue
from engine.models.config import Catalogue
from engine.models.hstu.model import HstuModel
from engine.models.loader import load_catalogue, load_model_dir
from engine.testing.models import random_tensors, save_random_model
from engine.types import Request, Task

CONFIG = CONFIGS["append"]
TENSORS = random_tensors(CONFIG)
IDS, TABLE = TENSORS["catalogue.item_ids"].numpy(), TENSORS["embeddings.item"]
NEW_IDS = np.array([9001, 7, 9002])


def model(dtype: str = "float32") -> HstuModel:
    return HstuModel(msgspec.structs.replace(CONFIG, dtype=dtype), TENSORS)


def catalogue(
    version: str = "2",
    new_ids: np.ndarray = NEW_IDS,
    ids: np.ndarray = IDS,
    table: torch.Tensor = TABLE,
    **settings: Any,
) -> ItemCatalogue:
    """The model's own catalogue with new items and as many new rows at its end."""
    rows = torch.arange(len(new_ids) * table.shape[1], dtype=torch.float32) / 64
    return ItemCatalogue(
        settings=msgspec.structs.replace(CONFIG.catalogue, version=version, **settings),
        item_ids=np.concatenate([ids, new_ids]),
        table=torch.cat([table, rows.view(len(new_ids), -1).to(table.dtype)]),
    )


def request(*items: int) -> Request:
    return Request(
        request_id="r", user_id="u", task=Task.PREFETCH, history={"item": np.array(items)}
    )


def test_grown_model_knows_the_new_items_and_the_old_one_does_not() -> None:
    old = model()
    grown = old.with_catalogue(catalogue())
    assert (old.catalogue_version, grown.catalogue_version) == ("1", "2")
    assert grown.prepare(request(1, 9002, 11, 7)).records[:, 0].tolist() == [1, 43, 2, 42]
    assert old.prepare(request(1, 9002, 11, 7)).records[:, 0].tolist() == [1, 2]
    assert grown.config.inputs.features[0].num_rows == NUM_ITEMS + 1 + 3


def test_everything_but_the_items_is_shared_and_the_same() -> None:
    old = model()
    grown = old.with_catalogue(catalogue())
    assert grown.spec == old.spec
    face = grown.describe()
    assert face._replace(sample_items=old.describe().sample_items) == old.describe()
    assert 9002 in face.sample_items
    assert all(one is two for one, two in zip(grown._layers, old._layers, strict=True))
    one, two = old.prepare(request(1, 11, 391)), grown.prepare(request(1, 11, 391))
    assert (one.seed, one.records.tolist()) == (two.seed, two.records.tolist())
    records = torch.from_numpy(one.records)
    assert torch.equal(old.embed(records), grown.embed(records))
    assert old.rank(old.embed(records), records).tolist() == (
        grown.rank(grown.embed(records), records).tolist()
    )


def test_new_rows_are_embedded_scored_and_retrieved() -> None:
    config = msgspec.structs.replace(
        CONFIG, rank=msgspec.structs.replace(CONFIG.rank, kind="dot", hidden=(), tasks=("score",))
    )
    new_row = torch.zeros(1, 16)
    new_row[0, 3] = 100.0
    grown = HstuModel(
        config, {k: v for k, v in TENSORS.items() if not k.startswith("heads.rank")}
    ).with_catalogue(
        ItemCatalogue(
            settings=msgspec.structs.replace(CONFIG.catalogue, version="2"),
            item_ids=np.append(IDS, 5),
            table=torch.cat([TABLE, new_row]),
        )
    )
    user = torch.zeros(16)
    user[3] = 1.0
    items, scores = grown.retrieve(user, 2, np.empty(0, np.int64))
    assert (int(items[0]), float(scores[0])) == (5, 1.0), "item rows are normed"
    assert 5 not in grown.retrieve(user, 41, np.array([NUM_ITEMS + 1]))[0]
    records = torch.from_numpy(grown.prepare(request(5)).records)
    assert records[:, 0].tolist() == [NUM_ITEMS + 1]
    assert float(grown.rank(user[None], records)[0, 0]) == 100.0


def test_table_is_compared_as_the_model_stores_it() -> None:
    grown = model("bfloat16").with_catalogue(catalogue(table=TABLE.bfloat16()))
    assert grown.prepare(request(7)).records[:, 0].tolist() == [NUM_ITEMS + 2]
    with pytest.raises(ConfigError, match=r"row 0 of embeddings.item is not what"):
        model().with_catalogue(catalogue(table=TABLE.bfloat16()))


def test_catalogue_grows_again_and_the_same_one_may_come_twice() -> None:
    grown = model().with_catalogue(catalogue())
    assert grown.with_catalogue(catalogue()).catalogue_version == "2"
    larger = catalogue("3", np.array([*NEW_IDS, 8]))
    assert grown.with_catalogue(larger).prepare(request(8)).records[:, 0].tolist() == [44]


def test_spare_rows_after_the_last_item_are_free_for_new_items() -> None:
    tensors = {**TENSORS, "catalogue.item_ids": TENSORS["catalogue.item_ids"][:-2]}
    spare = HstuModel(CONFIG, tensors)
    table = TABLE.clone()
    table[-2:] = 0.5
    new = ItemCatalogue(
        settings=msgspec.structs.replace(CONFIG.catalogue, version="2"),
        item_ids=np.append(IDS[:-2], 5),
        table=table,
    )
    assert spare.with_catalogue(new).prepare(request(5)).records[:, 0].tolist() == [39]


def changed_table(row: int, value: float) -> torch.Tensor:
    table = TABLE.clone()
    table[row, 2] = value
    return table


def changed_ids(place: int, item: int) -> np.ndarray:
    ids = IDS.copy()
    ids[place] = item
    return ids


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ids": IDS[:-4], "new_ids": NEW_IDS}, "has 39 items, the loaded model has 40"),
        ({"ids": changed_ids(3, 30)}, "item 3 is the id 30, in the loaded model it is 31"),
        ({"ids": IDS[::-1]}, "item 0 is the id 391, in the loaded model it is 1"),
        ({"table": changed_table(7, 0.25)}, "row 7 of embeddings.item of id 61 is not what"),
        ({"table": changed_table(0, 0.25)}, "row 0 of embeddings.item is not what"),
        ({"table": changed_table(40, 0.25)}, "row 40 of embeddings.item of id 391 is not"),
        ({"table": TABLE[:, :8]}, r"is \[44, 8\], the loaded model has \[41, 16\]"),
        ({"new_ids": np.array([9001, 31])}, "holds id 31 more than once"),
        ({"new_ids": np.array([-1])}, "the negative id -1"),
        ({"version": "1"}, "set catalogue.version"),
        ({"first_row": 0}, "catalogue.first_row is 0, the loaded model has 1"),
        ({"unknown_history": "error"}, "catalogue.unknown_history is 'error'"),
    ],
)  # fmt: skip
def test_anything_but_more_items_is_refused(changes: dict[str, Any], named: str) -> None:
    old = model()
    with pytest.raises(ConfigError, match=named):
        old.with_catalogue(catalogue(**changes))
    assert old.catalogue_version == "1"


def test_zero_with_another_sign_is_a_changed_row() -> None:
    tensors = {**TENSORS, "embeddings.item": changed_table(7, 0.0)}
    with pytest.raises(ConfigError, match="row 7"):
        HstuModel(CONFIG, tensors).with_catalogue(catalogue(table=changed_table(7, -0.0)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_new_rows_that_are_no_numbers_are_refused(value: float) -> None:
    new = catalogue()
    new.table[-1, 0] = value
    with pytest.raises(ConfigError, match="NaN"):
        model().with_catalogue(new)


def test_table_without_rows_for_its_items_is_refused() -> None:
    short = catalogue()
    with pytest.raises(ConfigError, match=r"43 items from row 1 on, but embeddings.item has 43"):
        model().with_catalogue(
            ItemCatalogue(settings=short.settings, item_ids=short.item_ids, table=short.table[:-1])
        )


def write_catalogue(path: Path, new: ItemCatalogue, **section: Any) -> Path:
    """A directory with the two tensors, one that nobody reads, and a config of that section."""
    path.mkdir(exist_ok=True)
    ids = torch.from_numpy(new.item_ids)
    save_file(
        {"catalogue.item_ids": ids, "embeddings.item": new.table, "other": torch.zeros(1)},
        path / "model.safetensors",
    )
    settings = {**msgspec.to_builtins(new.settings), **section}
    (path / "config.json").write_text(json.dumps({"name": "ignored", "catalogue": settings}))
    return path


def test_catalogue_of_a_directory_grows_the_model_of_another(tmp_path: Path) -> None:
    save_random_model(tmp_path / "model", CONFIG)
    loaded = load_model_dir(tmp_path / "model")
    assert loaded.catalogue_version == "1"
    own = load_catalogue(tmp_path / "model")
    assert (own.settings, own.item_ids.tolist()) == (CONFIG.catalogue, IDS.tolist())
    assert torch.equal(own.table, TABLE)
    new = load_catalogue(write_catalogue(tmp_path / "new", catalogue()))
    assert new.settings == Catalogue(version="2", first_row=1, unknown_candidates="unk")
    assert loaded.with_catalogue(new).prepare(request(7)).records[:, 0].tolist() == [42]


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"catalogue.item_ids": None}, "catalogue.item_ids is missing"),
        ({"embeddings.item": None}, "embeddings.item is missing"),
        ({"catalogue.item_ids": torch.zeros(3)}, r"is float32 \[3\], expected int64"),
        ({"catalogue.item_ids": torch.zeros(1, 3, dtype=torch.int64)}, r"int64 \[1, 3\]"),
        ({"embeddings.item": torch.zeros(3, 2, dtype=torch.int64)}, r"is int64 \[3, 2\]"),
        ({"embeddings.item": torch.zeros(3)}, r"is float32 \[3\], expected a float type \["),
    ],
)
def test_directory_without_a_catalogue_is_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor | None], named: str
) -> None:
    held = {"catalogue.item_ids": torch.arange(3), "embeddings.item": torch.zeros(3, 2), **tensors}
    save_file(
        {name: tensor for name, tensor in held.items() if tensor is not None},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=named):
        load_catalogue(tmp_path)


@pytest.mark.parametrize(
    ("section", "named"), [({"version": ""}, "version is ''"), ({"size": 3}, "size")]
)
def test_wrong_section_of_the_config_is_named(
    tmp_path: Path, section: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"config.json: catalogue.*{named}"):
        load_catalogue(write_catalogue(tmp_path, catalogue(), **section))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json is missing"):
        load_catalogue(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model.safetensors is missing"):
        load_catalogue(tmp_path)
