"""The input stage against published encoders: table rows, sums, and token order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.models.config import ContextFeature, Feature, HstuLayers, Inputs, ModelConfig, RankHead
from engine.models.hstu.input_stage import (
    RecordLayout,
    rows_from_newest,
    rows_from_start,
    time_bucket,
)
from engine.models.hstu.model import HstuModel
from engine.testing.models import random_tensors
from engine.types import Request, Task
from tests.numerics.golden_models import read_golden

CONTEXTUAL = {"meta_ctx": 3, "meta_hist": 0, "meta_clip": 2, "meta_edge": 0}


def encoder_model(tables: dict[str, torch.Tensor], **inputs: Any) -> HstuModel:
    """A model whose item table is x, so that record row i embeds x[i]."""
    x = tables["embeddings.item"]
    config = ModelConfig(
        name="encoder",
        layers=HstuLayers(
            family="meta",
            num_layers=1,
            hidden_size=24,
            num_heads=1,
            qk_dim=8,
            v_dim=8,
            scale_length=64,
        ),
        inputs=Inputs(
            features=(Feature(name="item", num_rows=len(x)),),
            embedding_scale=True,
            max_history_events=200,
            **inputs,
        ),
        rank=RankHead(kind="dot"),
    )
    return HstuModel(config, {**random_tensors(config), **tables})


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("prefix", CONTEXTUAL)
def test_meta_encoder_gives_published_rows_and_sums(prefix: str) -> None:
    _, tensors = read_golden("input_stage")
    file = {key.removeprefix(prefix + "."): value for key, value in tensors.items()}
    num_context = CONTEXTUAL[prefix]
    num_positions, num_buckets = len(file["position_weight"]), len(file["time_weight"])
    model = encoder_model(
        {
            "embeddings.item": file["x"],
            "positions.weight": file["position_weight"],
            "time_buckets.weight": file["time_weight"],
        },
        positions="from_newest",
        num_positions=num_positions,
        num_time_buckets=num_buckets,
    )
    layout = RecordLayout.from_config(model.config)
    assert layout.position is not None
    assert layout.time_bucket is not None
    targets = file.get("num_targets", torch.zeros_like(file["lengths"])).tolist()
    for start, stop, num_targets in zip(
        file["offsets"].tolist(), file["offsets"].tolist()[1:], targets, strict=False
    ):
        times = file["timestamps"][start:stop].numpy()
        positions = rows_from_newest(
            num_positions, num_context, stop - start - num_targets, num_targets
        )
        buckets = time_bucket(num_buckets, int(times[-1]), times)
        np.testing.assert_array_equal(positions, file["position_index"][start:stop])
        np.testing.assert_array_equal(buckets, file["time_index"][start:stop])
        records = layout.empty_records(stop - start)
        records[:, 0] = np.arange(start, stop)
        records[:, layout.position] = positions
        records[:, layout.time_bucket] = buckets
        assert_close(model.embed(torch.from_numpy(records)), file["out"][start:stop])


def nvidia_records(start: int, length: int, num_candidates: int, x_start: int) -> torch.Tensor:
    """Records of rows [start, start + length) of a user; candidates share the last position."""
    history = length - num_candidates
    positions = np.full(length, rows_from_start(96, start + history, start + history + 1)[0])
    positions[:history] = rows_from_start(96, start, start + history)
    rows = np.arange(x_start, x_start + length)
    return torch.from_numpy(np.stack([rows, positions], axis=1))


def test_positions_from_start_give_published_sums_whole_and_in_chunks() -> None:
    _, tensors = read_golden("input_stage")
    for prefix in ("nv", "nv.chunk0", "nv.chunk1", "nv.chunk2", "nv.chunk3"):
        file = {key.removeprefix(prefix + "."): value for key, value in tensors.items()}
        model = encoder_model(
            {"embeddings.item": file["x"], "positions.weight": tensors["nv.position_weight"]},
            positions="from_start",
            num_positions=96,
        )
        starts = file.get("start", torch.zeros_like(file["lengths"])).tolist()
        x_start = 0
        for start, length, num_candidates in zip(
            starts, file["lengths"].tolist(), file["num_candidates"].tolist(), strict=True
        ):
            records = nvidia_records(start, length, num_candidates, x_start)
            rows = slice(x_start, x_start + length)
            if prefix == "nv":
                assert records[:, 1].tolist() == file["position_index"][rows].tolist()
            assert_close(model.embed(records), file["out"][rows])
            x_start += length


def interleaving_model() -> HstuModel:
    """Items 0..999 are their own rows; two contextual features; ages of one bucket a row."""
    config = ModelConfig(
        name="interleave",
        layers=HstuLayers(
            family="meta",
            num_layers=1,
            hidden_size=8,
            num_heads=1,
            qk_dim=8,
            v_dim=8,
            scale_length=64,
        ),
        inputs=Inputs(
            features=(
                Feature(name="item", num_rows=1000),
                Feature(name="action", num_rows=10, on="history"),
            ),
            tokens_per_event=2,
            context=(
                ContextFeature(name="first", num_rows=1000),
                ContextFeature(name="second", num_rows=1000),
            ),
            positions="from_newest",
            num_positions=64,
            num_time_buckets=64,
            max_history_events=20,
        ),
        rank=RankHead(kind="dot"),
    )
    tensors = random_tensors(config)
    tensors["catalogue.item_ids"] = torch.arange(1000)
    return HstuModel(config, tensors)


def tokens(model: HstuModel, records: np.ndarray) -> tuple[list[int], list[int]]:
    """(kinds, ids) of records: 0 contextual, 1 item, 2 action."""
    layout = RecordLayout.from_config(model.config)
    columns = (layout.context, 0, layout.action)
    kinds, ids = [], []
    for record in records.tolist():
        carried = [kind for kind, column in enumerate(columns) if record[column] >= 0]
        assert len(carried) == 1
        kinds.append(carried[0])
        token_id = record[columns[carried[0]]]
        # Tables of contextual features are joined: the second one's rows come after 1000 others.
        ids.append(token_id % 1000 if carried[0] == 0 else token_id)
    return kinds, ids


def split(values: torch.Tensor, lengths: torch.Tensor) -> list[np.ndarray]:
    return [part.numpy() for part in values.split(lengths.tolist())]


def test_events_interleave_in_published_token_order() -> None:
    _, tensors = read_golden("input_stage")
    file = {key.removeprefix("interleave_in."): value for key, value in tensors.items()}
    model = interleaving_model()
    layout = RecordLayout.from_config(model.config)
    items, actions, times = (
        split(file[key], file["history_lengths"]) for key in ("item_id", "action_id", "time")
    )
    candidates = split(file["candidate_id"], file["candidate_lengths"])
    contexts = split(file["contextual_id"], file["contextual_lengths"])
    offsets = tensors["interleave.offsets"].tolist()
    for user, query_time in enumerate(file["query_time"].tolist()):
        prepared = model.prepare(
            Request(
                request_id="r",
                user_id="u",
                task=Task.RANK,
                history={"item": items[user], "action": actions[user], "time": times[user]},
                candidates={"item": candidates[user]},
                context=contexts[user],
                query_time=query_time,
            )
        )
        rows = slice(offsets[user], offsets[user + 1])
        records = np.concatenate([prepared.records, prepared.suffix_records])
        kinds, ids = tokens(model, records)
        assert kinds == tensors["interleave.token_kind"][rows].tolist()
        assert ids == tensors["interleave.token_id"][rows].tolist()
        token_times = tensors["interleave.token_time"][rows].numpy()
        assert layout.time_bucket is not None
        np.testing.assert_array_equal(
            records[:, layout.time_bucket], time_bucket(64, query_time, token_times)
        )


def test_appended_chunk_begins_with_the_action_of_a_cached_item() -> None:
    _, tensors = read_golden("input_stage")
    file = {key.removeprefix("interleave_append_in."): value for key, value in tensors.items()}
    model = interleaving_model()
    items = split(file["item_id"], file["item_lengths"])
    actions = split(file["action_id"], file["action_lengths"])
    candidates = split(file["candidate_id"], file["candidate_lengths"])
    offsets = tensors["interleave_append.offsets"].tolist()
    for user in range(3):
        is_cut = len(actions[user]) > len(items[user])
        old_items = [101, 102, 103]
        old_actions = [6, 7] if is_cut else [6, 7, 8]
        cached_tokens = 2 + len(old_items) + len(old_actions)
        item = np.concatenate([np.array(old_items), items[user]])
        prepared = model.prepare(
            Request(
                request_id="r",
                user_id="u",
                task=Task.RANK,
                history={
                    "item": item,
                    "action": np.concatenate([np.array(old_actions), actions[user]]),
                    "time": np.zeros(len(item), dtype=np.int64),
                },
                candidates={"item": candidates[user]},
                context=np.array([1, 2]),
                query_time=0,
            )
        )
        chunk = np.concatenate([prepared.records[cached_tokens:], prepared.suffix_records])
        kinds, ids = tokens(model, chunk)
        rows = slice(offsets[user], offsets[user + 1])
        assert kinds == tensors["interleave_append.token_kind"][rows].tolist()
        assert ids == tensors["interleave_append.token_id"][rows].tolist()
