"""`config.json` of a model directory. `docs/model-directory.md` describes it for users.

Everything the scores depend on stands here or in `model.safetensors`: what the model reads, how
rows are formed, which mask it was trained with. Unknown keys are refused.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from engine.config import require

_MAX_LAYERS = 1024
_MAX_NAME = 256
_MAX_WINDOW = (1 << 31) - 1


def _require_eps(name: str, value: float | None) -> None:
    require(
        value is None or (math.isfinite(value) and value > 0),
        f"{name} is {value}: give a finite number above 0",
    )


class HstuLayers(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="hstu",
    tag_field="architecture",
):  # fmt: skip
    """The stack of HSTU layers.

    Attributes:
        family: Which published formula (`meta`, `research`, `nvidia`).
        scale_length: N, the constant the attention sum is divided by. -1 would take it from the
            batch, which no cache can serve: refused at start.
        alpha: Factor on q.k; null means qk_dim ** -0.5 (research: 1).
        norm_eps: Null means 1e-6 (meta, research) or 1e-5 (nvidia).
        window: Rows further back than this are hidden; 0 shows all.
        target_group_size: Candidates come in groups of this size, causal inside (nvidia).
        residual: Add the layer's input to its output (nvidia may switch it off).
        group_norm: Norm over each head separately (meta).
        concat_ua: Project [U, norm(a), U * norm(a)] (research).
        relative_bias: Position and time bias on q.k (research); needs `time`.
    """

    family: Literal["meta", "research", "nvidia"]
    num_layers: int
    hidden_size: int
    num_heads: int
    qk_dim: int
    v_dim: int
    scale_length: int
    alpha: float | None = None
    norm_eps: float | None = None
    window: int = 0
    target_group_size: int = 1
    residual: bool = True
    group_norm: bool = False
    concat_ua: bool = False
    relative_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "qk_dim", "v_dim",
                     "target_group_size"):  # fmt: skip
            require(getattr(self, name) >= 1, f"layers.{name} is {getattr(self, name)}: give >= 1")
        require(
            self.scale_length == -1 or self.scale_length >= 1,
            f"layers.scale_length is {self.scale_length}: give the N the model was trained with",
        )
        require(
            self.num_layers <= _MAX_LAYERS,
            f"layers.num_layers is {self.num_layers}: give at most {_MAX_LAYERS}",
        )
        require(
            self.alpha is None or math.isfinite(self.alpha),
            f"layers.alpha is {self.alpha}: give a finite number",
        )
        _require_eps("layers.norm_eps", self.norm_eps)
        require(
            0 <= self.window <= _MAX_WINDOW,
            f"layers.window is {self.window}: give 0 (off) to {_MAX_WINDOW}",
        )
        require(
            not (self.group_norm and self.family != "meta"),
            f"layers.group_norm is of the meta family, this model is {self.family}",
        )
        require(
            not ((self.concat_ua or self.relative_bias) and self.family != "research"),
            f"layers.concat_ua and relative_bias are of the research family, not {self.family}",
        )
        require(
            self.residual or self.family == "nvidia",
            f"layers.residual=false is of the nvidia family, this model is {self.family}",
        )
        require(
            self.target_group_size == 1 or self.family == "nvidia",
            f"layers.target_group_size is of the nvidia family, this model is {self.family}",
        )
        require(
            self.window == 0 or self.window >= self.target_group_size,
            f"layers.window {self.window} is smaller than target_group_size "
            f"{self.target_group_size}: a group must fit in the window",
        )


class Feature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One declared input of an event, a candidate, or the context.

    A categorical feature (`num_rows` > 0) indexes the table `embeddings.<name>` [num_rows, width].
    A dense feature (`num_rows` 0) is projected by `embeddings.<name>` [dim, width].

    Attributes:
        name: `item` and `action` are built in; others are sent as `history_<name>`,
            `candidate_<name>`.
        num_rows: Rows of its table; the rows of `item` follow the catalogue.
        dim: Values per event of a dense feature.
        width: Columns it fills when features are concatenated; null means hidden_size.
        on: Whether events, candidates or both carry it. A row without it gets zeros.
    """

    name: str
    num_rows: int = 0
    dim: int = 1
    width: int | None = None
    on: Literal["history", "candidates", "both"] = "both"

    def __post_init__(self) -> None:
        where = f"inputs.features, {self.name!r}"
        require(
            self.name.isidentifier() and self.name not in ("time", "context"),
            f"{where}: give a name of letters, digits and _ other than time and context",
        )
        require(self.num_rows >= 0, f"{where}: num_rows is {self.num_rows}, give 0 (dense) or more")
        require(self.dim >= 1, f"{where}: dim is {self.dim}, give 1 or more")
        require(
            self.dim == 1 or self.num_rows == 0,
            f"{where}: dim {self.dim} is for dense features (num_rows 0)",
        )
        require(
            self.width is None or self.width >= 1, f"{where}: width is {self.width}, give 1 or more"
        )


class ContextFeature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One contextual row: a categorical value with a table of its own."""

    name: str
    num_rows: int

    def __post_init__(self) -> None:
        where = f"inputs.context, {self.name!r}"
        require(self.name.isidentifier(), f"{where}: give a name of letters, digits and _")
        require(self.num_rows >= 1, f"{where}: num_rows is {self.num_rows}, give 1 or more")


class Inputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How events become rows of the model.

    Attributes:
        features: Declared features, `item` first. With tokens_per_event 2, `action` makes the
            second row; with 1, it is combined like any other.
        tokens_per_event: 1, or 2 (item row, then action row).
        combine: Several features of a row are summed, or concatenated to hidden_size columns.
        context: Contextual rows before the history, in order.
        context_mask: "bidirectional": contextual rows read all contextual rows and the whole
            history (reuse: exact); "causal": plain rows (reuse: append).
        embedding_scale: Multiply embeddings by sqrt(hidden_size) before positions are added.
        positions: "none"; "from_start": row i uses table row min(i, num_positions - 1), and all
            candidates the row of the history's length; "from_newest": Meta's encoder (counted
            back, see docs), which makes reuse exact.
        num_positions: Rows of the position table.
        num_time_buckets: Rows of Meta's query-age table, 0 for none; needs query_time and makes
            reuse request.
        max_history_events: Longest history the model serves.
        overlong: What a longer one does: a typed error, or keep the newest events.
        keep_stride: keep_newest drops events in multiples of this.
    """

    features: tuple[Feature, ...]
    tokens_per_event: Literal[1, 2] = 1
    combine: Literal["sum", "concat"] = "sum"
    context: tuple[ContextFeature, ...] = ()
    context_mask: Literal["causal", "bidirectional"] = "causal"
    embedding_scale: bool = False
    positions: Literal["none", "from_start", "from_newest"] = "none"
    num_positions: int = 0
    num_time_buckets: int = 0
    max_history_events: int
    overlong: Literal["error", "keep_newest"] = "error"
    keep_stride: int = 1

    def __post_init__(self) -> None:
        names = [feature.name for feature in self.features]
        require(
            bool(names) and names[0] == "item", f"inputs.features must begin with item: {names}"
        )
        require(len(set(names)) == len(names), f"inputs.features has a name twice: {names}")
        item = self.features[0]
        require(
            item.num_rows >= 1 and item.on == "both",
            "inputs.features: item needs num_rows >= 1 and on=both",
        )
        if self.tokens_per_event == 2:
            action = next((feature for feature in self.features if feature.name == "action"), None)
            require(
                action is not None and action.num_rows >= 1 and action.on == "history",
                "inputs.tokens_per_event is 2: declare a feature `action` with num_rows >= 1 and "
                "on=history",
            )
        contexts = [feature.name for feature in self.context]
        require(len(set(contexts)) == len(contexts), f"inputs.context has a name twice: {contexts}")
        require(
            (self.positions == "none") == (self.num_positions == 0),
            f"inputs.positions {self.positions!r} does not go with "
            f"num_positions {self.num_positions}",
        )
        require(self.max_history_events >= 1, "inputs.max_history_events must be at least 1")
        require(self.keep_stride >= 1, "inputs.keep_stride must be at least 1")
        require(self.num_time_buckets >= 0, "inputs.num_time_buckets must be 0 or more")


class Catalogue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the catalogue's item ids map to.

    A model that runs can take a new item table that adds items (`Model.with_catalogue`).

    The ids stand in `model.safetensors` as `catalogue.item_ids` [num_items] int64, strictly
    increasing per row order not required; item k has table row k + first_row.

    Attributes:
        version: Of the items and their table; another weights version is not needed to add some.
        first_row: Table row of the first catalogue item (rows before it are padding or unk).
        unknown_history, unknown_candidates: What an id that is not in the catalogue does.
        unk_row: Table row that "unk" uses.
    """

    version: str = "1"
    first_row: int = 0
    unknown_history: Literal["error", "drop", "unk"] = "drop"
    unknown_candidates: Literal["error", "unk"] = "error"
    unk_row: int = 0

    def __post_init__(self) -> None:
        require(
            bool(self.version) and "/" not in self.version,
            f"catalogue.version is {self.version!r}: give a text without /",
        )


class RankHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scores of candidate rows.

    Attributes:
        kind: "mlp": an MLP (`heads.rank.mlp.{i}.weight/.bias`, ReLU between) gives `tasks` values;
            "dot": dot product of the candidate row with its item embedding, one value.
        hidden: Widths of the MLP's hidden layers; empty for one linear layer.
        tasks: Names of the score columns.
        norm: Applied to the candidate row first.
        norm_eps: Of that norm.
    """

    kind: Literal["mlp", "dot"]
    hidden: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ("score",)
    norm: Literal["none", "l2", "layer_norm"] = "none"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require(bool(self.tasks), "rank.tasks is empty: name at least one score column")
        require(
            len(set(self.tasks)) == len(self.tasks), f"rank.tasks has a name twice: {self.tasks}"
        )
        require(
            all(width >= 1 for width in self.hidden), f"rank.hidden is {self.hidden}: give >= 1"
        )
        require(
            self.kind == "mlp" or (len(self.tasks) == 1 and not self.hidden),
            "rank.kind dot gives one score: name one task and no hidden layers",
        )
        _require_eps("rank.norm_eps", self.norm_eps)


class RetrieveHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """User embedding = the last history row, normed; item score = its dot with the item's row.

    Attributes:
        norm: Applied to the row ("l2": divided by max(norm, norm_eps)).
        norm_items: Divide each item row by max(its l2 norm, norm_eps) too.
    """

    norm: Literal["none", "l2", "layer_norm"] = "none"
    norm_items: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _require_eps("retrieve.norm_eps", self.norm_eps)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of `config.json`.

    Attributes:
        format_version: Of this file format.
        name: Model name on the wire.
        weights_version: Version on the wire; part of every fingerprint.
        dtype: Of weights, K/V and linears; norms and attention sums are float32.
        layers, inputs, catalogue, rank, retrieve: See there. A head that is null is not served.
    """

    format_version: Literal[1] = 1
    name: str
    weights_version: str = "1"
    dtype: Literal["float32", "bfloat16"] = "float32"
    layers: HstuLayers
    inputs: Inputs
    catalogue: Catalogue = Catalogue()
    rank: RankHead | None = None
    retrieve: RetrieveHead | None = None

    def __post_init__(self) -> None:
        layers, inputs = self.layers, self.inputs
        for name in ("name", "weights_version"):
            value = getattr(self, name)
            require(
                bool(value) and "/" not in value,
                f"{name} is {value!r}: give a text without /, it is part of paths",
            )
            require(
                value.isprintable() and len(value) <= _MAX_NAME,
                f"{name} is {value!r:.60}: give at most {_MAX_NAME} printable characters",
            )
        require(
            inputs.tokens_per_event == 1 or not layers.relative_bias,
            "layers.relative_bias needs tokens_per_event 1: the bias reads the next event's time",
        )
        require(
            not (inputs.context and layers.relative_bias),
            "layers.relative_bias does not go with inputs.context: a contextual row has no time",
        )
        require(
            not (inputs.num_time_buckets and inputs.positions != "from_newest"),
            "inputs.num_time_buckets is Meta's encoder: it needs positions from_newest",
        )
        require(
            not layers.relative_bias
            or layers.scale_length == -1
            or inputs.max_history_events + (self.rank is not None) <= layers.scale_length,
            f"inputs.max_history_events {inputs.max_history_events} does not fit "
            f"layers.scale_length {layers.scale_length}: the position bias has one weight for each "
            "of scale_length positions, and candidates need one after the history",
        )
        require(
            inputs.positions != "from_newest" or inputs.num_positions > len(inputs.context),
            f"inputs.num_positions is {inputs.num_positions}: contextual rows and candidates need "
            f"{len(inputs.context) + 1}",
        )
        self._check_widths()
        item = inputs.features[0]
        require(
            0 <= self.catalogue.unk_row < item.num_rows,
            f"catalogue.unk_row is {self.catalogue.unk_row}: item has {item.num_rows} rows",
        )
        require(
            0 <= self.catalogue.first_row < item.num_rows,
            f"catalogue.first_row is {self.catalogue.first_row}: item has {item.num_rows} rows",
        )

    def _check_widths(self) -> None:
        inputs, hidden_size = self.inputs, self.layers.hidden_size
        widths = {feature.name: feature.width or hidden_size for feature in inputs.features}
        if inputs.tokens_per_event == 2:
            action = widths.pop("action")
            require(
                action == hidden_size,
                f"inputs.features, 'action': width is {action}, an action row of its own has "
                f"hidden_size {hidden_size}",
            )
        if inputs.combine == "concat":
            require(
                sum(widths.values()) == hidden_size,
                f"inputs.combine concat: widths {widths} add up to {sum(widths.values())}, not to "
                f"hidden_size {hidden_size}",
            )
        else:
            require(
                all(width == hidden_size for width in widths.values()),
                f"inputs.combine sum: widths {widths} must all be hidden_size {hidden_size}",
            )
        reads_item_rows = self.retrieve is not None or (
            self.rank is not None and self.rank.kind == "dot"
        )
        require(
            widths["item"] == hidden_size or not reads_item_rows,
            f"inputs.features, 'item': width is {widths['item']}, but a dot with the item's row "
            f"needs hidden_size {hidden_size}",
        )
