"""Golden files about what comes before the first layer: encoders, token order, weight layout.

They run through the engine's own preparation of requests and its embedding; no attention backend
takes part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine.entrypoints.golden_file import GoldenFile, stack_config, stack_tensors
from engine.entrypoints.golden_kinds import Comparison
from engine.models.config import (
    ContextFeature,
    Feature,
    HstuLayers,
    Inputs,
    ModelConfig,
    RankHead,
)
from engine.models.hstu.input_stage import (
    ITEM_COLUMN,
    RecordLayout,
    rows_from_newest,
    time_bucket,
)
from engine.models.hstu.model import HstuModel
from engine.models.hstu.tensors import expected_shapes
from engine.types import Int64Array, Request, Task

_TIME_ROWS = 4096


class Tokens(NamedTuple):
    """A user's rows in order. kind: 0 contextual, 1 item, 2 action."""

    kind: Int64Array
    id: Int64Array
    records: Int64Array


def check_input_stage(file: GoldenFile, compare: Comparison) -> list[str]:
    """All parts of the file; returns what is skipped, and why."""
    skipped = []
    for prefix, num_context in (file.config.contextual or {}).items():
        if f"{prefix}.time_weight" in file.tensors:
            _check_meta_encoder(file, prefix, num_context, compare)
    if "nv.x" in file.tensors:
        _check_position_encoder(file, "nv", compare)
        chunk = 0
        while f"nv.chunk{chunk}.x" in file.tensors:
            _check_position_encoder(file, f"nv.chunk{chunk}", compare)
            chunk += 1
    if "interleave.token_id" in file.tensors:
        _check_interleave(file, compare)
    if "interleave_append.token_id" in file.tensors:
        _check_interleave_append(file, compare)
    if "interleave_targets.token_id" in file.tensors:
        skipped.append(
            "interleave_targets: a candidate followed by an action slot is the order of training; "
            "the engine serves candidates as items"
        )
    return skipped


def check_layout(
    file: GoldenFile, siblings: Iterator[GoldenFile], compare: Comparison
) -> list[str]:
    """Per-head interleaved weights -> blocks, and with a layer file's norm to its K and V."""
    heads, width = file.config.num_heads, file.config.qk_dim
    native = file.tensor("native_weight_out_in")
    block = native.view(heads, 4, width, -1).permute(3, 1, 0, 2).reshape(native.shape[1], -1)
    bias = file.tensor("native_bias").view(heads, 4, width).permute(1, 0, 2).reshape(-1)
    compare.rows("block_weight_in_out", block, file.tensor("block_weight_in_out"))
    compare.rows("block_bias", bias[None], file.tensor("block_bias")[None])
    for sibling in siblings:
        if torch.equal(sibling.tensors.get("layers.0._linear_uvqk_weight", native), block):
            config = stack_config(sibling.config, 1)
            tensors = stack_tensors(sibling, config)
            tensors |= {"layers.0.uvqk.weight": block, "layers.0.uvqk.bias": bias}
            with torch.inference_mode():
                rows = HstuModel(config, tensors, file.path.name).project(0, file.tensor("x"))
            compare.rows("k", rows.k, file.tensor("k"))
            compare.rows("v", rows.v, file.tensor("v"))
            return []
    return ["k, v: no layer file here has these weights, so the input norm is not known"]


@dataclass(slots=True, eq=False)
class _Encoder:
    """A model whose item table is the given rows, so that item i embeds to row i.

    Attributes:
        model, layout: Of that model.
    """

    model: HstuModel
    layout: RecordLayout

    @classmethod
    def build(cls, inputs: Inputs, width: int, tables: dict[str, torch.Tensor]) -> _Encoder:
        config = ModelConfig(
            name="golden",
            layers=HstuLayers(
                family="meta", num_layers=1, hidden_size=width, num_heads=1, qk_dim=1, v_dim=1,
                scale_length=1,
            ),
            inputs=inputs,
            rank=RankHead(kind="dot"),
        )  # fmt: skip
        tensors = {
            name: torch.zeros([size or 1 for size in shape])
            for name, shape in expected_shapes(config).items()
        }
        tensors["catalogue.item_ids"] = torch.arange(inputs.features[0].num_rows)
        return cls(HstuModel(config, {**tensors, **tables}), RecordLayout.from_config(config))

    def records(
        self,
        history: dict[str, Int64Array],
        candidates: Int64Array,
        *,
        context: Sequence[int] = (),
        query_time: int | None = None,
    ) -> Int64Array:
        """Records of [contextual | history | candidates], as a request for them has."""
        request = Request(
            request_id="golden",
            user_id="golden",
            task=Task.RANK if len(candidates) else Task.PREFETCH,
            history=history,
            candidates={"item": candidates} if len(candidates) else None,
            context=np.array(context, np.int64) if context else None,
            query_time=query_time,
        )
        prepared = self.model.prepare(request)
        return np.concatenate((prepared.records, prepared.suffix_records))

    def embed(self, records: Int64Array) -> torch.Tensor:
        with torch.inference_mode():
            return self.model.embed(torch.from_numpy(records))


def _check_meta_encoder(
    file: GoldenFile, prefix: str, num_context: int, compare: Comparison
) -> None:
    x, lengths = file.tensor(f"{prefix}.x"), file.counts(f"{prefix}.lengths")
    targets = _counts(file, f"{prefix}.num_targets", len(lengths))
    positions, ages = file.tensor(f"{prefix}.position_weight"), file.tensor(f"{prefix}.time_weight")
    names = [f"context{index}" for index in range(num_context)]
    inputs = Inputs(
        features=(Feature(name="item", num_rows=len(x)),),
        context=tuple(ContextFeature(name=name, num_rows=len(x)) for name in names),
        embedding_scale=True,
        positions="from_newest",
        num_positions=len(positions),
        num_time_buckets=len(ages),
        max_history_events=max(1, *lengths),
    )
    tables = {"embeddings.item": x, "positions.weight": positions, "time_buckets.weight": ages}
    tables |= {f"embeddings.context.{name}": x for name in names}
    encoder = _Encoder.build(inputs, x.shape[1], tables)
    all_times = file.tensor(f"{prefix}.timestamps").to(torch.int64).numpy()
    users = []
    for start, length, num_targets in zip(_starts(lengths), lengths, targets, strict=True):
        rows = np.arange(start, start + length)
        times = all_times[start : start + length]
        history = slice(num_context, length - num_targets)
        query_time = int(times[-1]) if length else 0
        if (times[history.stop :] == query_time).all():
            records = encoder.records(
                {"item": rows[history], "time": times[history]},
                rows[history.stop :],
                context=rows[:num_context].tolist(),
                query_time=query_time,
            )
        else:
            # Targets at several times: one request has one query time, so the parts are used.
            records = encoder.layout.empty_records(length)
            records[:, ITEM_COLUMN] = rows
            records[:, encoder.layout.position or 0] = rows_from_newest(
                len(positions), num_context, history.stop, num_targets
            )
            records[:, encoder.layout.time_bucket or 0] = time_bucket(len(ages), query_time, times)
        users.append(records)
    records = np.concatenate(users)
    compare.rows(f"{prefix}.out", encoder.embed(records), file.tensor(f"{prefix}.out"))
    for name, column in (
        ("position_index", encoder.layout.position),
        ("time_index", encoder.layout.time_bucket),
    ):
        compare.equal(f"{prefix}.{name}", records[:, column or 0], file.tensor(f"{prefix}.{name}"))


def _check_position_encoder(file: GoldenFile, prefix: str, compare: Comparison) -> None:
    """NVIDIA's encoder over a whole sequence, or over a chunk that begins at `start`."""
    x, lengths = file.tensor(f"{prefix}.x"), file.counts(f"{prefix}.lengths")
    candidates = _counts(file, f"{prefix}.num_candidates", len(lengths))
    starts = _counts(file, f"{prefix}.start", len(lengths))
    positions = file.tensor("nv.position_weight")
    inputs = Inputs(
        features=(Feature(name="item", num_rows=len(x)),),
        embedding_scale=True,
        positions="from_start",
        num_positions=len(positions),
        max_history_events=1 + max(
            start + length for start, length in zip(starts, lengths, strict=True)
        ),
    )  # fmt: skip
    encoder = _Encoder.build(
        inputs, x.shape[1], {"embeddings.item": x, "positions.weight": positions}
    )
    users = []
    for first, length, count, cached in zip(
        _starts(lengths), lengths, candidates, starts, strict=True
    ):
        rows = np.arange(first, first + length)
        items = np.concatenate((np.zeros(cached, np.int64), rows[: length - count]))
        users.append(encoder.records({"item": items}, rows[length - count :])[cached:])
    records = np.concatenate(users)
    compare.rows(f"{prefix}.out", encoder.embed(records), file.tensor(f"{prefix}.out"))
    if f"{prefix}.position_index" in file.tensors:
        compare.equal(
            f"{prefix}.position_index",
            records[:, encoder.layout.position or 0],
            file.tensor(f"{prefix}.position_index"),
        )


def _token_encoder(file: GoldenFile, source: str, num_context: int, longest: int) -> _Encoder:
    """A model of two tokens an event whose tables hold every id of the input tensors."""
    num_rows = 1 + max(
        [int(tensor.max()) for name, tensor in file.tensors.items()
         if name.startswith(f"{source}.") and name.endswith("_id") and tensor.numel()]
    )  # fmt: skip
    return _Encoder.build(
        Inputs(
            features=(
                Feature(name="item", num_rows=num_rows),
                Feature(name="action", num_rows=num_rows, on="history"),
            ),
            tokens_per_event=2,
            context=tuple(
                ContextFeature(name=f"context{index}", num_rows=num_rows)
                for index in range(num_context)
            ),
            positions="from_newest",
            num_positions=num_context + 2,
            num_time_buckets=_TIME_ROWS,
            max_history_events=longest + 1,
        ),
        1,
        {},
    )


def _tokens(encoder: _Encoder, records: Int64Array) -> Tokens:
    """Kind and id of each record."""
    layout = encoder.layout
    item, action = records[:, ITEM_COLUMN], records[:, layout.action or 0]
    kind, ids = np.where(item >= 0, 1, 2), np.where(item >= 0, item, action)
    if layout.context is not None:
        num_rows = encoder.model.config.inputs.context[0].num_rows
        context = records[:, layout.context]
        kind = np.where(context >= 0, 0, kind)
        ids = np.where(context >= 0, context % num_rows, ids)
    return Tokens(kind, ids, records)


def _check_interleave(file: GoldenFile, compare: Comparison) -> None:
    source = "interleave_in"
    lengths = file.counts(f"{source}.history_lengths")
    items = _split(file, f"{source}.item_id", lengths)
    actions = _split(file, f"{source}.action_id", lengths)
    times = _split(file, f"{source}.time", lengths)
    contexts = _split_by(file, f"{source}.contextual_id", f"{source}.contextual_lengths")
    candidates = _split_by(file, f"{source}.candidate_id", f"{source}.candidate_lengths")
    query_times = file.counts(f"{source}.query_time")
    encoder = _token_encoder(file, source, len(contexts[0]), max(lengths))
    users = [
        _tokens(
            encoder,
            encoder.records(
                {"item": items[user], "action": actions[user], "time": times[user]},
                candidates[user],
                context=contexts[user].tolist(),
                query_time=query_times[user],
            ),
        )
        for user in range(len(lengths))
    ]
    _compare_tokens(file, "interleave", users, compare)
    expected = _split(file, "interleave.token_time", file.counts("interleave.lengths"))
    buckets = [
        time_bucket(_TIME_ROWS, query_time, user_times)
        for query_time, user_times in zip(query_times, expected, strict=True)
    ]
    column = encoder.layout.time_bucket or 0
    actual = np.concatenate([user.records[:, column] for user in users])
    compare.equal("interleave.token_time", actual, torch.from_numpy(np.concatenate(buckets)))


def _check_interleave_append(file: GoldenFile, compare: Comparison) -> None:
    """Chunks: one action more than items belongs to the last cached item, and comes first."""
    source = "interleave_append_in"
    items = _split_by(file, f"{source}.item_id", f"{source}.item_lengths")
    actions = _split_by(file, f"{source}.action_id", f"{source}.action_lengths")
    candidates = _split_by(file, f"{source}.candidate_id", f"{source}.candidate_lengths")
    encoder = _token_encoder(file, source, 0, max(len(part) for part in actions))
    users = []
    for item, action, candidate in zip(items, actions, candidates, strict=True):
        num_cached = len(action) - len(item)
        whole = np.concatenate((np.zeros(num_cached, np.int64), item))
        records = encoder.records(
            {"item": whole, "action": action, "time": np.zeros(len(whole), np.int64)},
            candidate,
            query_time=0,
        )
        users.append(_tokens(encoder, records[num_cached:]))
    _compare_tokens(file, "interleave_append", users, compare)


def _compare_tokens(
    file: GoldenFile, prefix: str, users: Sequence[Tokens], compare: Comparison
) -> None:
    counts = np.array([len(user.kind) for user in users])
    kinds = np.concatenate([user.kind for user in users])
    ids = np.concatenate([user.id for user in users])
    compare.equal(f"{prefix}.lengths", counts, file.tensor(f"{prefix}.lengths"))
    compare.equal(f"{prefix}.token_kind", kinds, file.tensor(f"{prefix}.token_kind"))
    compare.equal(f"{prefix}.token_id", ids, file.tensor(f"{prefix}.token_id"))


def _counts(file: GoldenFile, name: str, num_users: int) -> list[int]:
    return file.counts(name) if name in file.tensors else [0] * num_users


def _starts(lengths: Sequence[int]) -> list[int]:
    return [int(start) for start in np.cumsum([0, *lengths])[:-1]]


def _split(file: GoldenFile, name: str, lengths: Sequence[int]) -> list[Int64Array]:
    values: Int64Array = file.tensor(name).to(torch.int64).numpy()
    return [
        values[start : start + length]
        for start, length in zip(_starts(lengths), lengths, strict=True)
    ]


def _split_by(file: GoldenFile, name: str, lengths: str) -> list[Int64Array]:
    return _split(file, name, file.counts(lengths))
