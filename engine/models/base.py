"""The contract between a model and the engine.

A model has two faces. The *host face* (numpy, called by the core) turns a request into integer
records and says which rows see what. The *device face* (torch, called by the runner) turns
records into rows and rows into answers. The engine never looks inside a record: it hashes it (the
fingerprint), keeps it, and hands it back to `embed`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from engine.errors import ConfigError
from engine.models.config import Catalogue
from engine.types import FeatureInfo, Float32Array, Int32Array, Int64Array, Request, Task

if TYPE_CHECKING:
    import torch

    from engine.attention_backends.base import AttentionBackend, AttentionBatch, KvPages


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a model declares about itself; the engine derives the reuse mode from it.

    Attributes:
        score: Attention weights: SiLU (summed) or softmax (merged by log-sum-exp).
        alpha: Factor on q.k before the score function.
        scale: Factor on the attention sum (1 / N); None when it depends on the batch.
        num_context: Contextual rows at the front of every history.
        has_bidirectional_context: Contextual rows read the whole history.
        has_positions_from_newest: A row's input depends on the history's length.
        has_query_time_inputs: History rows read the query time.
        has_next_event_bias: The last history row is provisional (committed length L - 1).
        bias: Kind of bias on q.k, None for none.
        max_history_tokens: Longest history in tokens, contextual rows included.
        max_chain: Longest suffix chain (rows a suffix row reads in its suffix, itself included).
    """

    name: str
    weights_version: str
    dtype: Literal["float32", "bfloat16"]
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    score: Literal["silu", "softmax"]
    alpha: float
    scale: float | None
    tokens_per_event: int
    num_context: int
    window: int
    has_bidirectional_context: bool
    has_positions_from_newest: bool
    has_query_time_inputs: bool
    has_next_event_bias: bool
    bias: Literal["research"] | None
    max_history_tokens: int
    max_chain: int
    tasks: tuple[Task, ...]
    flops_per_token: int

    @property
    def bytes_per_token_layer(self) -> int:
        """Bytes of K and V of one token in one layer."""
        width = self.num_kv_heads * (self.qk_dim + self.v_dim)
        return width * (4 if self.dtype == "float32" else 2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedRequest:
    """A request as the engine schedules it. Rows are [contextual | history]; then the suffix.

    Attributes:
        records: int64 [L, W], C-contiguous. Row i holds every input that K/V row i is a function
            of, besides rows before it (and, in exact mode, the whole history): table rows, dense
            values as bits, the times a bias reads.
        seed: Bytes hashed before the first record: contextual features, weights version, and in
            exact mode everything the whole history contributes.
        num_events: Events used (after drops and truncation).
        start_event: Absolute index of the first event used.
        num_known_events: Events from `start_event` on before the first one that the catalogue does
            not know. A later delta request may start there at the latest: up to there, events and
            rows correspond, and no item table that adds items can change it.
        base_rows: Of a delta request, the rows below its base: they were not sent, their records
            are zeros and must never run. 0 for every other request.
        suffix_records: int64 [S, W] of the suffix rows, same columns.
        suffix_parent: int32 [S]: suffix row that row s also reads (and its parents), -1 for none;
            parent[s] < s. `suffix_position` is its position (rows with a bias read it).
        suffix_reads_self: bool [S]: False for a history row run once more as a query (its K/V is
            in the pages already).
        suffix_kv_lo: int32 [S]: first history row each suffix row sees; it sees up to L.
        num_fixed_suffix: Leading suffix rows every suffix piece must contain (the provisional row).
        read_row: Suffix row whose output is the user embedding; None for rank.
        num_candidates: Suffix rows from num_fixed_suffix on, in candidate order (rank).
        chain_size: Candidates are cut between pieces only at multiples of this.
        candidate_items: int64 [c] catalogue ids, as sent.
        excluded_rows: int64, item table rows that retrieve leaves out.
    """

    records: Int64Array
    seed: bytes
    num_events: int
    start_event: int
    num_known_events: int
    base_rows: int = 0
    suffix_records: Int64Array
    suffix_parent: Int32Array
    suffix_position: Int32Array
    suffix_reads_self: np.ndarray[tuple[int], np.dtype[np.bool_]]
    suffix_kv_lo: Int32Array
    num_fixed_suffix: int
    read_row: int | None
    num_candidates: int
    chain_size: int
    candidate_items: Int64Array
    excluded_rows: Int64Array

    @property
    def length(self) -> int:
        """History rows that are kept (contextual rows included, a provisional row not)."""
        return len(self.records)

    @property
    def suffix_length(self) -> int:
        return len(self.suffix_records)


class Intervals(NamedTuple):
    """Half-open `[lo, hi)` over the history for each row, int32 [n] each."""

    lo: Int32Array
    hi: Int32Array


class BiasInputs(NamedTuple):
    """What a `research` bias reads, from the records: int64 [n] each."""

    time: Int64Array
    next_time: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemCatalogue:
    """The items a model knows and their rows: what `Model.with_catalogue` takes.

    Attributes:
        settings: Section `catalogue` of config.json, with the catalogue's version.
        item_ids: int64 [num_items]; item k has row settings.first_row + k of the table.
        table: [R, E], any float type.
    """

    settings: Catalogue
    item_ids: Int64Array
    table: torch.Tensor


class ModelFace(NamedTuple):
    """What clients are told about a model's inputs and outputs (see `types.ModelInfo`).

    sample_items: Some ids of the catalogue.
    """

    features: tuple[FeatureInfo, ...]
    context_features: tuple[str, ...]
    score_names: tuple[str, ...]
    reads_query_time: bool
    embedding_dim: int
    max_history_events: int
    keep_stride: int
    sample_items: tuple[int, ...] = ()


class Projected(NamedTuple):
    """A layer's projections. u: [T, H*V]; q, k: [T, H, A]; v: [T, H, V]; the model's dtype."""

    u: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class StepPages(Protocol):
    """The pages of a step's layers."""

    def layer(self, layer: int) -> KvPages:
        """The layer's pages, after what they wait for has arrived."""


LayerProgram: TypeAlias = "Callable[[torch.Tensor, AttentionBatch, StepPages], torch.Tensor]"
"""All layers of a model on one backend: x [T, D], the step and its pages -> [T, D].

New K/V rows are written to the pages. x is not modified. A row's bits depend only on its own
inputs and the keys it sees, as far as model and backend promise it. Owned by the device thread.
"""


class Model(ABC):
    """A loaded model. Shapes: T rows of a step, D hidden_size, H heads, A qk_dim, V v_dim."""

    spec: ModelSpec

    # Host face: numpy only, called by the core, no torch operation.

    @abstractmethod
    def describe(self) -> ModelFace:
        """What clients are told."""

    @abstractmethod
    def prepare(self, request: Request) -> PreparedRequest:
        """Check a request against the model and form its records.

        Raises InvalidRequest or TooLarge, naming the field, the value, the limit and the remedy.
        The request is not modified.

        A delta request becomes what the whole request would be, except for the records below
        `base_rows`; HistoryNeeded when the events sent are not enough for that. The engine asks
        this only of a model whose rows depend on nothing but earlier rows (reuse mode append, no
        bias).
        """

    @abstractmethod
    def sample_request(
        self, num_events: int, num_candidates: int, task: Task | None = None
    ) -> Request:
        """A made-up request that `prepare` takes, to warm the engine up with real shapes.

        Items are the catalogue's, every declared input is there, and the context and the query's
        time where the model reads them. Its user and request id are `sample`.

        Args:
            num_events: Of the history; no more are made than the model serves. A retrieve needs 1.
            num_candidates: Of a rank, 1 or more; other tasks have none.
            task: Rank when not given, if the model has a rank head, else retrieve.
        """

    @property
    @abstractmethod
    def catalogue_version(self) -> str:
        """Of the items the model knows; kept state does not depend on it."""

    def with_catalogue(self, catalogue: ItemCatalogue) -> Model:
        """A model of the same weights that knows more items. This one is not modified, and they
        share all that is the same. Kept K/V stays valid: the weights version stays.

        Raises ConfigError naming the first difference, when the catalogue does anything but add
        items, or the model cannot take a new one.
        """
        raise ConfigError(
            f"model {self.spec.name} cannot take catalogue {catalogue.settings.version!r}: its "
            f"architecture has no item table of its own; load it as another model"
        )

    @abstractmethod
    def history_intervals(self, start: int, stop: int, length: int) -> Intervals:
        """What history rows [start, stop) of a history of `length` rows see."""

    def bias_inputs(self, records: Int64Array) -> BiasInputs:
        """The columns a bias reads; only models with a bias have them."""
        raise NotImplementedError(f"{self.spec.name} has no attention bias")

    # Device face: torch, called by the runner under inference mode.

    @abstractmethod
    def embed(self, records: torch.Tensor) -> torch.Tensor:
        """records int64 [T, W] -> x [T, D], a row-wise function."""

    @abstractmethod
    def project(self, layer: int, x: torch.Tensor) -> Projected:
        """Norm and projections of one layer. x is not modified."""

    @abstractmethod
    def output(
        self, layer: int, x: torch.Tensor, u: torch.Tensor, attended: torch.Tensor
    ) -> torch.Tensor:
        """Gate, norm, output projection and residual. attended: float32 [T, H, V]."""

    def layer_program(self, backend: AttentionBackend) -> LayerProgram | None:
        """How all layers run on that backend; None: one after another, `project`, attention and
        `output`. A model that inherits a program and changes a layer must override this too."""
        return None

    def bias_tables(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(position weights [2n - 1], time weights [buckets + 1]), float32."""
        raise NotImplementedError(f"{self.spec.name} has no attention bias")

    @abstractmethod
    def rank(self, x: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        """Candidate rows x [c, D] and their records [c, W] -> scores float32 [c, num_tasks]."""

    @abstractmethod
    def user_embedding(self, x: torch.Tensor) -> torch.Tensor:
        """Rows x [n, D] -> float32 [n, D], normed as the retrieve head says."""

    @abstractmethod
    def retrieve(
        self, user: torch.Tensor, top_k: int, excluded_rows: Int64Array
    ) -> tuple[Int64Array, Float32Array]:
        """Exact top-k of one user embedding float32 [D]: (catalogue ids [k], scores [k]).

        Scores descend; equal scores: the lower id first. `excluded_rows` are left out. Fewer than
        top_k come back when the catalogue has no more.
        """
