"""What each kind of layer file demands: which rows run, and which tensors they must equal.

Kinds: full, cached, incremental, mfalcon, delta, e2e. Legend: U users, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.entrypoints.golden_file import (
    GoldenFile,
    retrieval_config,
    retrieval_tensors,
    stack_config,
    stack_tensors,
)
from engine.entrypoints.golden_run import GoldenUsers, UserRun, Variant, prepare_rows
from engine.errors import ConfigError
from engine.models.base import PreparedRequest
from engine.models.hstu.model import HstuModel
from engine.types import Int64Array, Request, Task

ATOL, RTOL = 5e-5, 1e-4


@dataclass(slots=True, eq=False)
class Comparison:
    """Collects the differences of one run of one file.

    mean_bound: for bfloat16 files, only the mean difference of outputs is bounded.
    """

    mean_bound: float | None = None
    max_error: float = 0.0
    failures: list[str] = field(default_factory=list)

    def rows(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare with tolerance; shapes must agree up to flattening trailing dimensions."""
        actual, expected = actual.double().flatten(1), expected.double().flatten(1)
        if actual.shape != expected.shape:
            self.failures.append(f"{name} is {list(actual.shape)}, not {list(expected.shape)}")
            return
        if not actual.numel():
            return
        difference = (actual - expected).abs()
        finite = bool(torch.isfinite(actual).all())
        error = float(difference.mean() if self.mean_bound is not None else difference.max())
        self.max_error = max(self.max_error, error)
        if self.mean_bound is not None:
            passed = error <= self.mean_bound
        else:
            passed = bool((difference <= ATOL + RTOL * expected.abs()).all())
        if not finite:
            self.failures.append(f"{name} is not finite: a slot was read that holds nothing")
        elif not passed:
            self.failures.append(f"{name} differs by {error:.2e}")

    def equal(self, name: str, actual: Int64Array, expected: torch.Tensor) -> None:
        """Compare integers."""
        if actual.shape != tuple(expected.shape) or not np.array_equal(actual, expected.numpy()):
            self.failures.append(f"{name} differs: {actual.tolist()} != {expected.tolist()}")


class StackCheck:
    """One layer file under one variant."""

    def __init__(self, file: GoldenFile, variant: Variant, comparison: Comparison) -> None:
        self.file = file
        self.compare = comparison
        self._variant = variant
        longest = max(file.config.lengths or [1]) + file.config.num_context
        config = stack_config(file.config, longest)
        self.model = HstuModel(config, stack_tensors(file, config), file.path.name)

    def users(self, lengths: Sequence[int]) -> GoldenUsers:
        """Users without state."""
        return GoldenUsers(self.model, self._variant, lengths)

    def split(self, name: str, lengths: Sequence[int]) -> list[torch.Tensor]:
        """A jagged tensor, one part per user, in the model's dtype."""
        dtype = torch.float32 if self.model.spec.dtype == "float32" else torch.bfloat16
        return list(torch.split(self.file.tensor(name).to(dtype), list(lengths)))

    def targets(self, num_users: int) -> list[int]:
        return self.file.config.target_counts or [0] * num_users

    def run_full(self, x_name: str, lengths: Sequence[int], out_name: str) -> GoldenUsers:
        """Whole sequences at once (history, targets), without state -> `out_name`."""
        targets = self.targets(len(lengths))
        history = [length - count for length, count in zip(lengths, targets, strict=True)]
        users = self.users(history)
        runs = [
            self.user_run(number, x, history[number], targets[number], start=0)
            for number, x in enumerate(self.split(x_name, lengths))
        ]
        outputs = users.run(runs)
        self.compare.rows(out_name, torch.cat(outputs), self.file.tensor(out_name))
        return users

    def prime(
        self, users: GoldenUsers, x_parts: Sequence[torch.Tensor], out_name: str | None
    ) -> None:
        """Histories alone; what they leave in the pages is the cache."""
        outputs = users.run(
            [self.user_run(number, x, len(x), 0, start=0) for number, x in enumerate(x_parts)]
        )
        if out_name is not None and out_name in self.file.tensors:
            self.compare.rows(out_name, torch.cat(outputs), self.file.tensor(out_name))

    def append(
        self, users: GoldenUsers, cached: Sequence[int], new: int, x_name: str, targets: list[int]
    ) -> torch.Tensor:
        """`new` history rows and targets a user on top of the cache; returns all their rows."""
        parts = self.split(x_name, [new + count for count in targets])
        return torch.cat(
            users.run(
                [
                    self.user_run(number, x, cached[number] + new, targets[number], cached[number])
                    for number, x in enumerate(parts)
                ]
            )
        )

    def caches(self, users: GoldenUsers, k_name: str, v_name: str, kept: Sequence[int],
               lengths: Sequence[int]) -> None:  # fmt: skip
        """Compare the first `kept` rows of each user in the pages with K and V per layer.

        The tensors, where the file has them, hold `lengths` rows of each user.
        """
        for layer in range(self.model.spec.num_layers):
            pages = [users.kept(layer, number, count) for number, count in enumerate(kept)]
            for name, side in ((f"{k_name}.{layer}", 0), (f"{v_name}.{layer}", 1)):
                if name not in self.file.tensors:
                    continue
                rows = torch.split(self.file.tensor(name), list(lengths))
                expected = [part[:count] for part, count in zip(rows, kept, strict=True)]
                actual = torch.cat([pair[side].flatten(1) for pair in pages])
                self.compare.rows(name, actual, torch.cat(expected))

    def user_run(
        self, number: int, x: torch.Tensor, num_history: int, num_targets: int, start: int
    ) -> UserRun:
        """History rows [start, num_history) and targets of a user, whose rows are x."""
        times, query_time = self._times(number, num_history)
        prepared = prepare_rows(
            self.model,
            num_history=num_history,
            num_targets=num_targets,
            times=times,
            query_time=query_time,
        )
        return UserRun(prepared, start, x, np.arange(prepared.suffix_length))

    def _times(self, number: int, num_history: int) -> tuple[Int64Array | None, int | None]:
        """Event times of a user and the time after the last, where a bias reads them."""
        if not self.model.spec.has_next_event_bias:
            return None, None
        row = self.file.tensor("timestamps")[number].to(torch.int64).numpy()
        after = int(row[num_history]) if num_history < len(row) else int(row[-1])
        return row[:num_history], after


def check_full(check: StackCheck) -> None:
    lengths = check.file.counts("lengths")
    users = check.run_full("x", lengths, "out")
    provisional = int(check.model.spec.has_next_event_bias)
    kept = [
        max(0, length - count - provisional)
        for length, count in zip(lengths, check.targets(len(lengths)), strict=True)
    ]
    check.caches(users, "k", "v", kept, lengths)


def check_cached(check: StackCheck) -> None:
    file, config = check.file, check.file.config
    lengths, cached = file.counts("lengths"), file.counts("hist_lengths")
    targets, new = check.targets(len(lengths)), config.new_history or 0
    users = check.users([length + new for length in cached])
    if "hist_x" in file.tensors:
        check.prime(users, check.split("hist_x", cached), "hist_out")
    else:
        whole = check.split("x", lengths)
        parts = [x[:length] for x, length in zip(whole, cached, strict=True)]
        check.prime(users, parts, None)
    check.caches(users, "k_cache", "v_cache", cached, cached)
    out = check.append(users, cached, new, "delta_x", targets)
    check.compare.rows("delta_out", out, file.tensor("delta_out"))
    check.run_full("x", lengths, "full_out")


def check_incremental(check: StackCheck) -> None:
    file, config = check.file, check.file.config
    new, num_targets = config.new_history or 0, config.targets or 0
    cached = file.counts("r0.hist_lengths")
    targets = [num_targets] * len(cached)
    users = check.users([length + new * config.rounds for length in cached])
    check.prime(users, check.split("r0.hist_x", cached), "r0.hist_out")
    for number in range(1, config.rounds + 1):
        out = check.append(users, cached, new, f"r{number}.delta_x", targets)
        check.compare.rows(f"r{number}.delta_out", out, file.tensor(f"r{number}.delta_out"))
        cached = [length + new for length in cached]
        if cached != file.counts(f"r{number}.hist_lengths"):
            raise ConfigError(f"r{number}.hist_lengths is not {cached}, as new_history says")
        check.run_full(
            f"r{number}.full_x", file.counts(f"r{number}.full_lengths"), f"r{number}.full_out"
        )
    check.caches(users, "final_k_cache", "final_v_cache", cached, cached)
    if "final_hist_x" in file.tensors:
        check.prime(check.users(cached), check.split("final_hist_x", cached), "final_hist_out")


def check_mfalcon(check: StackCheck) -> None:
    file, config = check.file, check.file.config
    cached = file.counts("hist_lengths")
    users = check.users(cached)
    check.prime(users, check.split("hist_x", cached), "hist_out")
    num_users, num_candidates, _ = file.tensor("cand_x").shape
    candidates = file.tensor("cand_x").to(check.split("hist_x", cached)[0].dtype)
    for name, size in (
        ("cand_out", num_candidates),
        ("cand_out_microbatched", config.microbatch or num_candidates),
    ):
        outputs = []
        for start in range(0, num_candidates, size):
            chosen = np.arange(start, min(start + size, num_candidates))
            runs = [
                UserRun(
                    prepare_rows(check.model, num_history=cached[user], num_targets=num_candidates),
                    cached[user],
                    candidates[user, start : start + size],
                    chosen,
                )
                for user in range(num_users)
            ]
            outputs.append(torch.stack(users.run(runs)))
        check.compare.rows(name, torch.cat(outputs, 1).flatten(0, 1), _flat(file.tensor(name)))
    check.caches(users, "k_cache", "v_cache", cached, cached)


def check_delta(check: StackCheck) -> None:
    """The last row of each user is recomputed in another form, over the cached others."""
    file = check.file
    lengths, replaced = file.counts("lengths"), file.counts("delta_pos")
    if replaced != [length - 1 for length in lengths]:
        raise ConfigError(f"delta_pos {replaced} is not the last row of lengths {lengths}")
    base = check.split("x_base", lengths)
    new = check.split("x_new", lengths)
    users = check.users(lengths)
    outputs = users.run(
        [check.user_run(number, x, len(x), 0, start=0) for number, x in enumerate(base)]
    )
    runs = []
    for number, x in enumerate(new):
        run = check.user_run(number, x, len(x), 0, start=len(x) - 1)
        runs.append(run._replace(x=x[-1:]))
    merged = [
        torch.cat((out[:-1], last)) for out, last in zip(outputs, users.run(runs), strict=True)
    ]
    check.compare.rows("out_delta", torch.cat(merged), file.tensor("out_delta"))
    check.run_full("x_new", lengths, "out_full")


LAYER_KINDS: Mapping[str, Callable[[StackCheck], None]] = {
    "full": check_full,
    "cached": check_cached,
    "incremental": check_incremental,
    "mfalcon": check_mfalcon,
    "delta": check_delta,
}


def retrieval_model(file: GoldenFile) -> HstuModel:
    """The model of a file of kind e2e."""
    config = retrieval_config(file.config)
    return HstuModel(config, retrieval_tensors(file, config), file.path.name)


def check_retrieval(
    file: GoldenFile, model: HstuModel, variant: Variant, compare: Comparison
) -> None:
    """Kind e2e: ids and times -> embeddings, scores of all items, top-k without the history."""
    lengths = file.counts("lengths")
    users = GoldenUsers(model, variant, lengths)
    top_ids = file.tensor("top10_ids_excluding_history")
    plain = [_retrieve_request(file, user, length, None) for user, length in enumerate(lengths)]
    without = [
        _retrieve_request(file, user, length, top_ids.shape[1])
        for user, length in enumerate(lengths)
    ]
    prepared = [model.prepare(request) for request in plain]
    embedded = [_embedded(model, request) for request in prepared]
    for rows, expected in zip(embedded, file.tensor("preprocessed"), strict=True):
        compare.rows("preprocessed", rows, expected[: len(rows)])
    scores_all = file.tensor("scores_all_items")
    results = users.retrieve(prepared, scores_all.shape[1])
    for user, result in enumerate(results):
        assert result.user_embedding is not None and result.item_scores is not None
        assert result.items is not None
        embedding = torch.from_numpy(result.user_embedding)[None]
        compare.rows("user_embedding", embedding, file.tensor("user_embedding")[user][None])
        scores = torch.zeros(scores_all.shape[1])
        scores[torch.from_numpy(result.items) - 1] = torch.from_numpy(result.item_scores)
        compare.rows("scores_all_items", scores[None], scores_all[user][None])
    results = users.retrieve([model.prepare(request) for request in without], top_ids.shape[1])
    for user, result in enumerate(results):
        assert result.items is not None and result.item_scores is not None
        top_scores = torch.from_numpy(result.item_scores)[None]
        compare.equal("top10_ids", result.items, top_ids[user])
        compare.rows("top10_scores", top_scores, file.tensor("top10_scores")[user][None])


def _retrieve_request(file: GoldenFile, user: int, length: int, top_k: int | None) -> Request:
    times = file.tensor("timestamps")[user].to(torch.int64).numpy()
    history = {"item": file.tensor("past_ids")[user, :length].to(torch.int64).numpy()}
    query_time = None
    if file.config.use_timestamps:
        history["time"] = times[:length]
        query_time = int(times[length]) if length < len(times) else int(times[-1])
    return Request(
        request_id="golden",
        user_id=str(user),
        task=Task.RETRIEVE,
        history=history,
        query_time=query_time,
        top_k=top_k,
        exclude_history=top_k is not None,
    )


def _embedded(model: HstuModel, prepared: PreparedRequest) -> torch.Tensor:
    """Input rows of all history rows, a provisional one included."""
    records = prepared.records
    if model.spec.has_next_event_bias:
        records = np.concatenate((records, prepared.suffix_records[:1]))
    return model.embed(torch.from_numpy(records))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(0, 1)
