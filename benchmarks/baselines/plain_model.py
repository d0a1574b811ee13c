"""An HSTU for ranking in plain PyTorch, as one writes it to serve a trained model: no user state.

It reads a model directory of the `nvidia` family (item ids and positions as inputs, a linear rank
head) without the engine's code. A batch is padded to its longest history. Attention has two
forms, and `fastest_model` times both, in both dtypes, on this machine:

- `dense`: one masked product over [history | candidates], under `torch.compile`.
- `blocked`: eager; blocks of query rows against the keys up to their end, which skips nearly half
  of the masked work.

Legend: B requests, L padded history, C padded candidates, H heads, D hidden size, A head width.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

QUERY_BLOCK = 256


class Query(NamedTuple):
    """Item ids of one request, oldest first, and of its candidates."""

    history: list[int]
    candidates: list[int]


class Batch(NamedTuple):
    """Padded table rows int64 [B, L] and [B, C], lengths int64 [B]."""

    items: Tensor
    candidates: Tensor
    lengths: Tensor


Attention = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""(q, k, v [B, H, L + C, A], lengths [B], L) -> [B, H, L + C, A], scores scaled by A ** -0.5."""


def dense_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, length: int) -> Tensor:
    """One product; rows see the history before them and themselves, candidates all of it."""
    place = torch.arange(q.shape[2])
    causal = place[None, :] <= place[:, None]
    is_history = place[None, :] < lengths[:, None]
    mask = (causal[None] & is_history[:, None, :]) | torch.eye(len(place), dtype=torch.bool)
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5)
    return torch.matmul(functional.silu(scores) * mask[:, None].to(q.dtype), v)


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, length: int) -> Tensor:
    """The same, block by block of the history; then the candidates and their own keys."""
    out = torch.empty_like(v)
    q = q * (q.shape[-1] ** -0.5)
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        weights = torch.matmul(q[:, :, start:stop], k[:, :, :stop].transpose(2, 3))
        functional.silu(weights, inplace=True)
        weights[..., start:].tril_()
        out[:, :, start:stop] = torch.matmul(weights, v[:, :, :stop])
    own_q, own_k, own_v = q[:, :, length:], k[:, :, length:], v[:, :, length:]
    weights = torch.matmul(own_q, k[:, :, :length].transpose(2, 3))
    functional.silu(weights, inplace=True)
    if len(lengths) > 1:
        is_history = torch.arange(length) < lengths[:, None]
        weights.mul_(is_history[:, None, None].to(weights.dtype))
    own = functional.silu((own_q * own_k).sum(-1, keepdim=True)) * own_v
    out[:, :, length:] = torch.matmul(weights, v[:, :, :length]) + own
    return out


class PlainHstu(nn.Module):
    """The layers of a model directory."""

    def __init__(self, folder: Path, dtype: torch.dtype, attention: Attention) -> None:
        super().__init__()
        config = json.loads((folder / "config.json").read_text())
        layers, inputs = config["layers"], config["inputs"]
        assert layers["family"] == "nvidia" and inputs["positions"] == "from_start"
        assert [feature["name"] for feature in inputs["features"]] == ["item"]
        self.num_heads, self.width = layers["num_heads"], layers["qk_dim"]
        self.scale = 1.0 / layers["scale_length"]
        self.num_layers, self.eps = layers["num_layers"], 1e-5
        self.dtype, self.attention = dtype, attention
        tensors = load_file(folder / "model.safetensors")
        item_ids = tensors.pop("catalogue.item_ids").numpy()
        self._order = np.argsort(item_ids)
        self._sorted_ids = item_ids[self._order]
        for name, tensor in tensors.items():
            kept = tensor.float() if "norm" in name or "heads" in name else tensor.to(dtype)
            self.register_buffer(name.replace(".", "_"), kept.contiguous())

    def rows_of(self, ids: Sequence[int]) -> np.ndarray:
        """Table rows of item ids."""
        place = np.searchsorted(self._sorted_ids, np.asarray(ids, np.int64))
        rows: np.ndarray = self._order[place]
        return rows

    def sample(self, length: int, num_candidates: int) -> Query:
        """A made-up query of that size."""
        place = np.arange(length + num_candidates) % len(self._sorted_ids)
        ids = self._sorted_ids[place].tolist()
        return Query(ids[:length], ids[length:])

    def batch(self, queries: Sequence[Query]) -> Batch:
        """Pad to the longest history and the most candidates."""
        lengths = [len(query.history) for query in queries]
        most = max(len(query.candidates) for query in queries)
        items = np.zeros((len(queries), max(lengths)), np.int64)
        candidates = np.zeros((len(queries), most), np.int64)
        for number, query in enumerate(queries):
            items[number, : lengths[number]] = self.rows_of(query.history)
            candidates[number, : len(query.candidates)] = self.rows_of(query.candidates)
        return Batch(torch.from_numpy(items), torch.from_numpy(candidates), torch.tensor(lengths))

    def forward(self, items: Tensor, candidates: Tensor, lengths: Tensor) -> Tensor:
        """Scores float32 [B, C]."""
        length = items.shape[1]
        positions = torch.cat(
            (
                torch.arange(length).expand(len(items), length),
                lengths[:, None].expand(candidates.shape),
            ),
            dim=1,
        ).clamp(max=len(self.positions_weight) - 1)
        rows = torch.cat((items, candidates), dim=1)
        x = self.embeddings_item[rows] + self.positions_weight[positions]
        for layer in range(self.num_layers):
            x = self._layer(layer, x, lengths, length)
        scores = x[:, length:].float() @ self.heads_rank_mlp_0_weight + self.heads_rank_mlp_0_bias
        return scores.squeeze(2)

    def _layer(self, layer: int, x: Tensor, lengths: Tensor, length: int) -> Tensor:
        def weight(name: str) -> Tensor:
            tensor: Tensor = getattr(self, f"layers_{layer}_{name}")
            return tensor

        def norm(values: Tensor, name: str) -> Tensor:
            parts = weight(f"{name}_weight"), weight(f"{name}_bias")
            return functional.layer_norm(values.float(), values.shape[-1:], *parts, self.eps)

        def heads(values: Tensor) -> Tensor:
            return values.unflatten(2, (self.num_heads, self.width)).transpose(1, 2).contiguous()

        normed = norm(x, "input_norm").to(self.dtype)
        projected = torch.addmm(
            weight("uvqk_bias"), normed.flatten(0, 1), weight("uvqk_weight")
        ).unflatten(0, x.shape[:2])
        u, v, q, k = functional.silu(projected, inplace=True).chunk(4, dim=2)
        attended = self.attention(heads(q), heads(k), heads(v), lengths, length)
        merged = attended.transpose(1, 2).flatten(2).float() * self.scale
        gated = (u.float() * norm(merged, "attn_norm")).to(self.dtype)
        output = torch.addmm(x.flatten(0, 1), gated.flatten(0, 1), weight("output_weight"))
        return output.unflatten(0, x.shape[:2])


class PlainRanker(NamedTuple):
    """A model in the form that was fastest here, and milliseconds of all forms tried."""

    model: PlainHstu
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    form: str
    tried_ms: dict[str, float]

    def warm_up(self, length: int, num_candidates: int, max_batch: int) -> None:
        """Batches of several sizes and lengths, so that nothing is compiled while serving."""
        for size in {1, 2, 3, max_batch}:
            for longest in (length, length * 7 // 8, length + 1):
                self.rank([self.model.sample(longest - i, num_candidates) for i in range(size)])

    @torch.inference_mode()
    def rank(self, queries: Sequence[Query]) -> list[list[float]]:
        """Scores of each query's candidates."""
        scores = self.run(*self.model.batch(queries))
        return [
            row[: len(query.candidates)].tolist()
            for row, query in zip(scores, queries, strict=True)
        ]


def fastest_model(folder: Path, length: int, num_candidates: int, rounds: int = 8) -> PlainRanker:
    """The fastest of both forms of attention and both dtypes, for one request of that size.

    They take turns, after a first run that compiles; what takes three times the best sits out.
    """
    forms = {"blocked": blocked_attention, "dense": dense_attention}
    tried: dict[str, float] = {}
    rankers: dict[str, PlainRanker] = {}
    for (form, attention), dtype in itertools.product(
        forms.items(), (torch.float32, torch.bfloat16)
    ):
        name = f"{form} {str(dtype).removeprefix('torch.')}"
        model = PlainHstu(folder, dtype, attention)
        run = torch.compile(model, dynamic=True) if form == "dense" else model
        rankers[name] = PlainRanker(model, run, name, tried)
        rankers[name].rank([model.sample(length, num_candidates)])
        tried[name] = _milliseconds(rankers[name], length, num_candidates)
    for name in list(rankers) * rounds:
        if tried[name] < 3 * min(tried.values()):
            again = _milliseconds(rankers[name], length, num_candidates)
            tried[name] = min(tried[name], again)
    return rankers[min(tried, key=lambda name: tried[name])]


def _milliseconds(ranker: PlainRanker, length: int, num_candidates: int) -> float:
    """Of one request."""
    query = ranker.model.sample(length, num_candidates)
    began_s = time.perf_counter()
    ranker.rank([query])
    return round(1e3 * (time.perf_counter() - began_s), 2)
