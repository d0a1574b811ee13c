"""Train a small HSTU (the `meta` layer) on interaction sequences, in plain PyTorch.

Shapes: B users of a batch, N padded length, T rows (B * N), D hidden size, H heads, A query/key
and V value dimension of a head, I items of the catalogue. Row i of a user is event i: its item's
embedding plus the embedding of position i. Two things are learned from one pass:

retrieve: row i predicts item i + 1 (softmax over the whole catalogue, cosine / temperature);
rank: an MLP on row i predicts whether the user liked item i; it sees the rows detached.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.entrypoints.logs import UserEvents, leave_last_out
from engine.models.config import (
    Feature,
    HstuLayers,
    Inputs,
    ModelConfig,
    RankHead,
    RetrieveHead,
)
from engine.models.loader import save_model_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What is trained and for how long; the defaults are those of the demo."""

    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 2
    head_dim: int = 32
    num_positions: int = 1024
    scale_length: int = 64
    epochs: int = 16
    batch_tokens: int = 2048
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    dropout: float = 0.3
    temperature: float = 0.07
    liked_from: float = 4.0
    seed: int = 7


_LAYER_TENSORS = {
    "input_norm.weight": "_input_norm_weight",
    "input_norm.bias": "_input_norm_bias",
    "uvqk.weight": "_uvqk_weight",
    "uvqk.bias": "_uvqk_beta",
    "attn_norm.weight": "_output_norm_weight",
    "attn_norm.bias": "_output_norm_bias",
    "output.weight": "_output_weight",
}
"""Name in a model directory -> name of the publisher."""


class MetaLayer(nn.Module):
    """One `meta` layer (STU), parameters named as its publisher names them."""

    def __init__(self, options: TrainOptions) -> None:
        super().__init__()
        width = options.num_heads * options.head_dim
        self.num_heads, self.head_dim = options.num_heads, options.head_dim
        self.scale_length, self.dropout = options.scale_length, options.dropout
        self._input_norm_weight = nn.Parameter(torch.ones(options.hidden_size))
        self._input_norm_bias = nn.Parameter(torch.zeros(options.hidden_size))
        self._uvqk_weight = nn.Parameter(torch.empty(options.hidden_size, 4 * width))
        self._uvqk_beta = nn.Parameter(torch.zeros(4 * width))
        self._output_norm_weight = nn.Parameter(torch.ones(width))
        self._output_norm_bias = nn.Parameter(torch.zeros(width))
        self._output_weight = nn.Parameter(torch.empty(3 * width, options.hidden_size))
        nn.init.xavier_uniform_(self._uvqk_weight)
        nn.init.xavier_uniform_(self._output_weight)

    def forward(self, x_BND: Tensor, mask_NN: Tensor) -> Tensor:
        """x [B, N, D] -> [B, N, D]; mask [N, N] is 1 / scale_length where row i reads row j."""
        batch, length, _ = x_BND.shape
        width = self.num_heads * self.head_dim
        n = functional.layer_norm(
            x_BND, x_BND.shape[-1:], self._input_norm_weight, self._input_norm_bias, 1e-6
        )
        projected = n @ self._uvqk_weight + self._uvqk_beta
        u, v, q, k = projected.split(width, dim=-1)
        u = functional.silu(u)
        heads = (batch, length, self.num_heads, self.head_dim)
        q_BHNA, k_BHNA, v_BHNV = (part.view(heads).transpose(1, 2) for part in (q, k, v))
        scores = q_BHNA @ (k_BHNA.transpose(2, 3) * self.head_dim**-0.5)
        weights = functional.silu(scores) * mask_NN
        a = (weights @ v_BHNV).transpose(1, 2).reshape(batch, length, width)
        normed = functional.layer_norm(
            a, (width,), self._output_norm_weight, self._output_norm_bias, 1e-6
        )
        y = torch.cat([u, a, u * normed], dim=-1)
        return x_BND + functional.dropout(y, self.dropout, self.training) @ self._output_weight


class Recommender(nn.Module):
    """Item and position tables, `meta` layers, a retrieve head and a rank head."""

    def __init__(self, options: TrainOptions, num_items: int) -> None:
        super().__init__()
        self.options = options
        self.items = nn.Embedding(num_items, options.hidden_size)
        self.positions = nn.Embedding(options.num_positions, options.hidden_size)
        nn.init.normal_(self.items.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.layers = nn.ModuleList(MetaLayer(options) for _ in range(options.num_layers))
        self.liked = nn.Sequential(
            nn.Linear(options.hidden_size, options.hidden_size),
            nn.ReLU(),
            nn.Linear(options.hidden_size, 1),
        )

    def forward(self, rows_BN: Tensor) -> Tensor:
        """Item rows int64 [B, N], right-padded with anything -> hidden rows [B, N, D]."""
        length = rows_BN.shape[1]
        position = torch.arange(length).clamp_(max=self.options.num_positions - 1)
        x = self.items(rows_BN) + self.positions(position)
        x = functional.dropout(x, self.options.dropout, self.training)
        mask = torch.ones(length, length).tril_() / self.options.scale_length
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def item_scores(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        """Hidden rows [n, D] -> cosine with every item [n, I], times `scale`."""
        users = functional.normalize(hidden, dim=-1, eps=1e-6) * scale
        return users @ functional.normalize(self.items.weight, dim=-1, eps=1e-6).T


class Quality(NamedTuple):
    """Full ranking, history excluded: shares over users, and the count behind hr_at_10."""

    hr_at_10: float
    ndcg_at_10: float
    num_hits: int
    num_users: int


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """All users' events as catalogue rows: int64 [n] each, and float32 [n] 1.0 where liked."""

    items: list[Tensor]
    liked: list[Tensor]
    catalogue: np.ndarray[tuple[int], np.dtype[np.int64]]


def to_sequences(users: Sequence[UserEvents], liked_from: float) -> Sequences:
    """Number the items 0..I-1 in ascending id order and turn every user's events into tensors."""
    catalogue = np.unique(np.concatenate([user.items for user in users]))
    items, liked = [], []
    for user in users:
        items.append(torch.from_numpy(np.searchsorted(catalogue, user.items)))
        actions = np.zeros(len(user)) if user.actions is None else user.actions
        liked.append(torch.from_numpy((actions >= liked_from).astype(np.float32)))
    return Sequences(items, liked, catalogue)


def batches(lengths: Sequence[int], batch_tokens: int, rng: np.random.Generator) -> list[list[int]]:
    """Users in batches of similar length, at most `batch_tokens` padded rows each, shuffled."""
    order = sorted(range(len(lengths)), key=lambda user: (lengths[user], rng.random()))
    groups: list[list[int]] = [[]]
    for user in reversed(order):
        longest = lengths[groups[-1][0]] if groups[-1] else 0
        if groups[-1] and longest * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
        groups[-1].append(user)
    return [groups[index] for index in rng.permutation(len(groups))]


def train(
    users: Sequence[UserEvents],
    options: TrainOptions,
    on_epoch: Callable[[int, float], None] = lambda epoch, loss: None,
) -> tuple[Recommender, Sequences]:
    """Train on every user's events up to the validation event; deterministic in `options.seed`.

    `on_epoch(epoch, loss)` is called after each epoch. The model comes back in eval mode.
    """
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    sequences = to_sequences(users, options.liked_from)
    stops = [leave_last_out(len(items)).train_stop for items in sequences.items]
    model = Recommender(options, len(sequences.catalogue)).train()
    steps_an_epoch = len(batches(stops, options.batch_tokens, rng))
    total = options.epochs * steps_an_epoch
    warm = max(1, total // 20)
    optimizer = torch.optim.AdamW(
        model.parameters(), options.learning_rate, betas=(0.9, 0.98),
        weight_decay=options.weight_decay,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * min(1, step / total))),
    )
    for epoch in range(options.epochs):
        losses = []
        for batch in batches(stops, options.batch_tokens, rng):
            loss = _loss(model, sequences, batch, stops)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        on_epoch(epoch, float(np.mean(losses)))
    return model.eval(), sequences


def _loss(
    model: Recommender, sequences: Sequences, batch: Sequence[int], stops: Sequence[int]
) -> Tensor:
    pad = nn.utils.rnn.pad_sequence
    rows = pad([sequences.items[user][: stops[user]] for user in batch], batch_first=True)
    liked = pad([sequences.liked[user][: stops[user]] for user in batch], batch_first=True)
    lengths = torch.tensor([stops[user] for user in batch])
    hidden = model(rows)
    position = torch.arange(rows.shape[1])
    has_next = position < (lengths - 1)[:, None]
    logits = model.item_scores(hidden[has_next], 1 / model.options.temperature)
    target = rows[:, 1:][has_next[:, :-1]]
    retrieve = functional.cross_entropy(logits, target)
    is_event = position < lengths[:, None]
    like_logits = model.liked(hidden[is_event].detach()).squeeze(-1)
    return retrieve + functional.binary_cross_entropy_with_logits(like_logits, liked[is_event])


@torch.no_grad()
def measure(model: Recommender, sequences: Sequences, *, on_validation: bool) -> Quality:
    """Full ranking by the training model itself, without the engine.

    The held-out event is the validation event, ranked after the training events, or the test
    event, ranked after all others.
    """
    hits, gain = 0, 0.0
    for items in sequences.items:
        split = leave_last_out(len(items))
        target = split.validation if on_validation else split.test
        hidden = model(items[None, :target])[0, -1:]
        scores = model.item_scores(hidden)[0]
        scores[items[:target]] = -math.inf
        place = int((scores > scores[items[target]]).sum())
        if place < 10 and scores[items[target]] > -math.inf:
            hits += 1
            gain += 1 / math.log2(place + 2)
    num_users = len(sequences.items)
    return Quality(hits / num_users, gain / num_users, hits, num_users)


def export(model: Recommender, sequences: Sequences, directory: str | os.PathLike[str]) -> None:
    """Write the model directory that the engine serves."""
    options = model.options
    config = ModelConfig(
        name="movielens-hstu",
        layers=HstuLayers(
            family="meta",
            num_layers=options.num_layers,
            hidden_size=options.hidden_size,
            num_heads=options.num_heads,
            qk_dim=options.head_dim,
            v_dim=options.head_dim,
            scale_length=options.scale_length,
        ),
        inputs=Inputs(
            features=(Feature(name="item", num_rows=len(sequences.catalogue)),),
            positions="from_start",
            num_positions=options.num_positions,
            # Candidates stand one position after the history.
            max_history_events=options.num_positions - 1,
            overlong="keep_newest",
            keep_stride=128,
        ),
        rank=RankHead(kind="mlp", hidden=(options.hidden_size,), tasks=("liked",)),
        retrieve=RetrieveHead(norm="l2", norm_items=True),
    )
    tensors = {
        "catalogue.item_ids": torch.from_numpy(sequences.catalogue),
        "embeddings.item": model.items.weight,
        "positions.weight": model.positions.weight,
    }
    for index, linear in enumerate(model.liked[::2]):
        tensors[f"heads.rank.mlp.{index}.weight"] = linear.weight.T
        tensors[f"heads.rank.mlp.{index}.bias"] = linear.bias
    for index, layer in enumerate(model.layers):
        for name, published in _LAYER_TENSORS.items():
            tensors[f"layers.{index}.{name}"] = getattr(layer, published)
    save_model_dir(directory, config, tensors)
