"""From requests to records and suffix rows, with literal expectations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.errors import HistoryNeeded, InvalidRequest, TooLarge
from engine.models.base import PreparedRequest
from engine.models.catalogue import ItemLookup
from engine.models.config import (
    Catalogue,
    ContextFeature,
    Feature,
    HstuLayers,
    Inputs,
    ModelConfig,
    RankHead,
    RetrieveHead,
)
from engine.models.hstu.prepare import Preparer
from engine.types import Request, Task

IDS = np.array([10, 11, 12, 13, 14, 15, 16, 17, 18, 19])
"""The catalogue: id 10 + k has table row 1 + k."""

AGE, CITY = ContextFeature(name="age", num_rows=5), ContextFeature(name="city", num_rows=3)
ACTION = Feature(name="action", num_rows=4, on="history")


def preparer(
    *,
    features: tuple[Feature, ...] = (),
    catalogue: dict[str, Any] | None = None,
    layers: dict[str, Any] | None = None,
    heads: dict[str, Any] | None = None,
    **inputs: Any,
) -> Preparer:
    config = ModelConfig(
        name="m",
        layers=HstuLayers(
            **{
                "family": "meta",
                "num_layers": 1,
                "hidden_size": 8,
                "num_heads": 1,
                "qk_dim": 4,
                "v_dim": 4,
                "scale_length": 32,
                **(layers or {}),
            }
        ),
        inputs=Inputs(
            **{
                "features": (Feature(name="item", num_rows=11), *features),
                "max_history_events": 6,
                **inputs,
            }
        ),
        catalogue=Catalogue(first_row=1, **(catalogue or {})),
        **({"rank": RankHead(kind="dot"), "retrieve": RetrieveHead()} if heads is None else heads),
    )
    return Preparer(config, ItemLookup(IDS, 1))


def request(
    item: list[int],
    candidates: list[int] | dict[str, Any] | None = None,
    task: Task | None = None,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Request:
    """Rank with candidates, retrieve without; `more` are further history arrays."""
    if isinstance(candidates, list):
        candidates = {"item": np.array(candidates, dtype=np.int64)}
    if "context" in options:
        options["context"] = np.array(options["context"], dtype=np.int64)
    return Request(
        request_id="r",
        user_id="u",
        task=task or (Task.RETRIEVE if candidates is None else Task.RANK),
        history={"item": np.array(item, dtype=np.int64), **(more or {})},
        candidates=candidates,
        **options,
    )


def suffix(prepared: PreparedRequest) -> dict[str, Any]:
    """The suffix as lists."""
    return {
        "parent": prepared.suffix_parent.tolist(),
        "position": prepared.suffix_position.tolist(),
        "reads_self": prepared.suffix_reads_self.tolist(),
        "kv_lo": prepared.suffix_kv_lo.tolist(),
        "num_fixed": prepared.num_fixed_suffix,
        "read_row": prepared.read_row,
        "num_candidates": prepared.num_candidates,
    }


def test_rank_maps_items_and_gives_all_candidates_the_position_after_the_history() -> None:
    p = preparer(positions="from_start", num_positions=7)
    prepared = p.prepare(request([12, 10, 12], [19, 19, 10]))
    assert prepared.records.tolist() == [[3, 0], [1, 1], [3, 2]]
    assert prepared.records.dtype == np.int64
    assert prepared.records.flags.c_contiguous
    assert prepared.suffix_records.tolist() == [[10, 3], [10, 3], [1, 3]]
    assert suffix(prepared) == {
        "parent": [-1, -1, -1],
        "position": [3, 3, 3],
        "reads_self": [True, True, True],
        "kv_lo": [0, 0, 0],
        "num_fixed": 0,
        "read_row": None,
        "num_candidates": 3,
    }
    assert prepared.candidate_items.tolist() == [19, 19, 10]
    assert (prepared.num_events, prepared.start_event, prepared.chain_size) == (3, 0, 1)


def test_positions_are_clipped_to_the_last_table_row() -> None:
    p = preparer(positions="from_start", num_positions=3)
    prepared = p.prepare(request([10, 10, 10, 10, 10], [10]))
    assert prepared.records[:, 1].tolist() == [0, 1, 2, 2, 2]
    assert prepared.suffix_records.tolist() == [[1, 2]]


def test_rank_on_an_empty_history_is_legal() -> None:
    prepared = preparer(positions="from_start", num_positions=7).prepare(request([], [11]))
    assert prepared.records.shape == (0, 2)
    assert prepared.suffix_records.tolist() == [[2, 0]]


def test_retrieve_runs_the_last_row_once_more_as_a_query() -> None:
    prepared = preparer().prepare(request([12, 13]))
    assert prepared.records.tolist() == [[3], [4]]
    assert prepared.suffix_records.tolist() == [[4]]
    assert suffix(prepared) == {
        "parent": [-1],
        "position": [1],
        "reads_self": [False],
        "kv_lo": [0],
        "num_fixed": 1,
        "read_row": 0,
        "num_candidates": 0,
    }


def test_rank_with_user_embedding_adds_the_last_row_before_the_candidates() -> None:
    prepared = preparer().prepare(request([12, 13], [10, 11], return_user_embedding=True))
    assert prepared.suffix_records.tolist() == [[4], [1], [2]]
    assert suffix(prepared) == {
        "parent": [-1, -1, -1],
        "position": [1, 2, 2],
        "reads_self": [False, True, True],
        "kv_lo": [0, 0, 0],
        "num_fixed": 1,
        "read_row": 0,
        "num_candidates": 2,
    }


def test_prefetch_has_no_suffix() -> None:
    prepared = preparer().prepare(request([12, 13], task=Task.PREFETCH))
    assert prepared.length == 2
    assert prepared.suffix_length == 0
    assert prepared.read_row is None


def test_retrieve_on_an_empty_history_names_the_remedy() -> None:
    with pytest.raises(InvalidRequest, match=r"no event .*send at least one known item"):
        preparer().prepare(request([]))


def test_excluded_rows_are_all_known_items_that_were_sent() -> None:
    p = preparer(overlong="keep_newest", max_history_events=2)
    prepared = p.prepare(request([10, 99, 12, 13], exclude_history=True))
    assert prepared.excluded_rows.tolist() == [1, 3, 4]
    assert preparer().prepare(request([10])).excluded_rows.tolist() == []


# Unknown items


@pytest.mark.parametrize(("policy", "rows"), [("drop", [[3], [4]]), ("unk", [[3], [7], [4]])])
def test_unknown_history_items_follow_the_policy(policy: str, rows: list[list[int]]) -> None:
    p = preparer(catalogue={"unknown_history": policy, "unk_row": 7})
    prepared = p.prepare(request([12, 99, 13], [10]))
    assert prepared.records.tolist() == rows
    assert prepared.num_events == len(rows)


def test_unknown_items_are_errors_when_the_policy_says_so() -> None:
    p = preparer(catalogue={"unknown_history": "error"})
    with pytest.raises(InvalidRequest, match=r"history\.item\[1\] is 99"):
        p.prepare(request([12, 99], [10]))
    with pytest.raises(InvalidRequest, match=r"candidates\.item\[0\] is 7, .*unknown_candidates"):
        p.prepare(request([12], [7]))


def test_unknown_candidates_use_the_unk_row_and_keep_their_ids() -> None:
    p = preparer(catalogue={"unknown_candidates": "unk", "unk_row": 0})
    prepared = p.prepare(request([12], [10, 99]))
    assert prepared.suffix_records.tolist() == [[1], [0]]
    assert prepared.candidate_items.tolist() == [10, 99]


# Over-long histories: max 6 events


@pytest.mark.parametrize(
    ("num_sent", "history_start", "start"),
    [
        (6, 0, 0),
        (7, 0, 4),  # ceil(1 / 4) * 4
        (10, 0, 4),
        (11, 0, 8),
        (7, 4, 8),  # ceil((4 + 7 - 6) / 4) * 4 = 8
        (6, 8, 8),
    ],
)
def test_keep_newest_starts_at_a_multiple_of_the_stride(
    num_sent: int, history_start: int, start: int
) -> None:
    p = preparer(overlong="keep_newest", keep_stride=4, positions="from_start", num_positions=7)
    sent = [10 + (history_start + index) % 10 for index in range(num_sent)]
    prepared = p.prepare(request(sent, [10], history_start=history_start))
    kept = sent[start - history_start :]
    assert prepared.start_event == start
    assert prepared.num_events == len(kept)
    assert prepared.records.tolist() == [[item - 9, i] for i, item in enumerate(kept)]


def test_whole_history_and_newest_part_give_equal_records() -> None:
    p = preparer(overlong="keep_newest", keep_stride=3, positions="from_start", num_positions=7)
    whole = [10 + index % 7 for index in range(20)]
    one = p.prepare(request(whole, [10]))
    other = p.prepare(request(whole[12:], [10], history_start=12))
    assert one.start_event == other.start_event == 15
    assert one.records.tolist() == other.records.tolist()
    assert one.seed == other.seed


def test_events_are_cut_before_unknown_ones_are_dropped() -> None:
    p = preparer(overlong="keep_newest", max_history_events=3)
    prepared = p.prepare(request([10, 99, 12, 13], [10]))
    assert prepared.start_event == 1
    assert prepared.records.tolist() == [[3], [4]]


def test_overlong_history_is_too_large_by_default() -> None:
    with pytest.raises(TooLarge, match=r"history has 7 events, the model serves 6") as caught:
        preparer().prepare(request([10] * 7, [10]))
    assert (caught.value.value, caught.value.limit) == (7, 6)


@pytest.mark.parametrize("history_start", [-4, 3])
def test_history_start_must_be_a_multiple_of_the_stride(history_start: int) -> None:
    p = preparer(overlong="keep_newest", keep_stride=4)
    with pytest.raises(InvalidRequest, match=r"history_start is .* keep_stride, 4"):
        p.prepare(request([10], [10], history_start=history_start))


# Context


def test_context_rows_come_first_and_index_joined_tables() -> None:
    p = preparer(context=(AGE, CITY), positions="from_start", num_positions=10)
    prepared = p.prepare(request([12, 13], [10], context=[4, 2]))
    # Columns: item, context, position. The city's rows come after the five ages.
    assert prepared.records.tolist() == [[-1, 4, 0], [-1, 7, 1], [3, -1, 2], [4, -1, 3]]
    assert prepared.suffix_records.tolist() == [[1, -1, 4]]
    assert prepared.num_events == 2


def test_context_seeds_the_fingerprint() -> None:
    p = preparer(context=(AGE, CITY))
    one, two = (p.prepare(request([12], [10], context=[age, 0])).seed for age in (1, 2))
    assert one != two
    assert one == p.prepare(request([13, 14], [11], context=[1, 0])).seed


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (None, r"context is missing: this model reads age, city"),
        ([1], r"context has 1 values: give 2 \(age, city\)"),
        ([1, 3], r"context, city, is 3: give a value below 3"),
        ([-1, 0], r"context holds -1"),
    ],
)
def test_context_is_checked(context: list[int] | None, message: str) -> None:
    options = {} if context is None else {"context": context}
    with pytest.raises(InvalidRequest, match=message):
        preparer(context=(AGE, CITY)).prepare(request([12], [10], **options))


def test_context_is_refused_when_not_read_unless_extras_are_ignored() -> None:
    with pytest.raises(InvalidRequest, match=r"context is given.*ignore_extra"):
        preparer().prepare(request([12], [10], context=[1]))
    assert preparer().prepare(request([12], [10], context=[1], ignore_extra=True)).length == 1


def test_exact_mode_seed_covers_the_whole_history() -> None:
    p = preparer(context=(AGE,), context_mask="bidirectional")
    seeds = {
        p.prepare(request(item, [10], context=[1])).seed
        for item in ([], [12], [12, 13], [12, 14], [13, 13])
    }
    assert len(seeds) == 5


# Item and action rows


def test_two_tokens_an_event_interleave_items_and_actions() -> None:
    p = preparer(features=(ACTION,), tokens_per_event=2, positions="from_start", num_positions=13)
    prepared = p.prepare(request([12, 13], [10], more={"action": np.array([3, 1])}))
    # Columns: item, action, position.
    assert prepared.records.tolist() == [[3, -1, 0], [-1, 3, 1], [4, -1, 2], [-1, 1, 3]]
    assert prepared.suffix_records.tolist() == [[1, -1, 4]]


def test_an_unknown_last_action_ends_the_history_with_an_item_row() -> None:
    p = preparer(features=(ACTION,), tokens_per_event=2)
    prepared = p.prepare(request([12, 13], more={"action": np.array([3])}))
    assert prepared.records.tolist() == [[3, -1], [-1, 3], [4, -1]]
    assert prepared.suffix_records.tolist() == [[4, -1]]
    assert prepared.suffix_position.tolist() == [2]
    assert prepared.num_events == 2


def test_dropping_the_open_event_leaves_complete_ones() -> None:
    p = preparer(features=(ACTION,), tokens_per_event=2)
    prepared = p.prepare(request([12, 99], more={"action": np.array([3])}))
    assert prepared.records.tolist() == [[3, -1], [-1, 3]]


@pytest.mark.parametrize(
    ("item", "action", "message"),
    [
        ([12, 13], [], r"history\.action has 0 values: give 2, or 1"),
        ([12], [4], r"history\.action holds 4: give values below 4"),
        ([12], [-1], r"history\.action holds -1"),
        ([], [1], r"history\.action has 1 values: give 0"),
    ],
)
def test_actions_are_checked(item: list[int], action: list[int], message: str) -> None:
    p = preparer(features=(ACTION,), tokens_per_event=2)
    with pytest.raises(InvalidRequest, match=message):
        p.prepare(request(item, [10], more={"action": np.array(action, dtype=np.int64)}))


# Further features


FEATURES = (
    Feature(name="genre", num_rows=5, on="history"),
    Feature(name="price", dim=2),
    Feature(name="slot", num_rows=3, on="candidates"),
)


def bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def test_features_stand_in_declared_columns() -> None:
    p = preparer(features=FEATURES)
    price = np.array([[1.5, -2.0], [-0.0, 0.25]], dtype=np.float32)
    prepared = p.prepare(
        request(
            [12, 13],
            {
                "item": np.array([10]),
                "price": np.array([[3.0, 4.0]], dtype=np.float32),
                "slot": np.array([2]),
            },
            more={"genre": np.array([4, 0]), "price": price},
        )
    )
    # Columns: item, genre, price (2), slot. Both zeros have the same bits.
    assert prepared.records.tolist() == [
        [3, 4, bits(1.5), bits(-2.0), -1],
        [4, 0, 0, bits(0.25), -1],
    ]
    assert prepared.suffix_records.tolist() == [[1, -1, bits(3.0), bits(4.0), 2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"genre": None}, r"history\.genre is missing"),
        ({"genre": np.array([5, 0])}, r"history\.genre holds 5: give values below 5"),
        ({"genre": np.array([0])}, r"history\.genre has 1 values: give 2"),
        ({"genre": np.array([0.0, 1.0])}, r"history\.genre is float64: give int64"),
        ({"price": np.zeros((2, 3), np.float32)}, r"history\.price has shape \[2, 3\]"),
        ({"price": np.zeros(2, np.float32)}, r"history\.price has shape \[2\]: give \[2, 2\]"),
        ({"price": np.full((2, 2), np.nan, np.float32)}, r"history\.price holds NaN"),
        ({"price": np.full((2, 2), 1e300)}, r"history\.price holds NaN or infinity"),
        ({"price": np.zeros((2, 2), np.bool_)}, r"history\.price is bool: give float32"),
        ({"color": np.array([0, 1])}, r"history holds color, .*\(it reads item, genre, price\)"),
        ({"slot": np.array([0, 1])}, r"history holds slot"),
        ({"time": np.array([0, 1])}, r"history holds time"),
    ],
)
def test_features_are_checked(change: dict[str, Any], message: str) -> None:
    more = {"genre": np.array([4, 0]), "price": np.zeros((2, 2), np.float32), **change}
    more = {name: value for name, value in more.items() if value is not None}
    with pytest.raises(InvalidRequest, match=message):
        preparer(features=FEATURES).prepare(request([12, 13], task=Task.PREFETCH, more=more))


def test_dense_values_may_be_whole_numbers() -> None:
    p = preparer(features=FEATURES)
    whole, real = (
        request([12], task=Task.PREFETCH, more={"genre": np.array([1]), "price": price})
        for price in (np.array([[3, -4]]), np.array([[3.0, -4.0]], np.float32))
    )
    assert p.prepare(whole).records.tolist() == p.prepare(real).records.tolist()


def test_empty_list_is_an_empty_dense_feature() -> None:
    empty = np.zeros(0, np.int64)  # what an empty list becomes
    more = {"genre": empty, "price": empty}
    prepared = preparer(features=FEATURES).prepare(request([], task=Task.PREFETCH, more=more))
    assert prepared.length == 0


def test_unread_features_are_ignored_when_the_request_says_so() -> None:
    prepared = preparer().prepare(
        request([12], [10], more={"time": np.array([5])}, query_time=9, ignore_extra=True)
    )
    assert prepared.records.tolist() == [[3]]


# Times


def test_time_buckets_are_ages_at_the_query() -> None:
    p = preparer(positions="from_newest", num_positions=4, num_time_buckets=3, context=(AGE,))
    prepared = p.prepare(
        request(
            [12, 13, 14],
            [10],
            more={"time": np.array([0, 939, 2000])},
            context=[2],
            query_time=1000,
        )
    )
    # Columns: item, context, position, bucket. Ages: contextual 1000, then 1000, 61, before 0.
    assert prepared.records.tolist() == [
        [-1, 2, 0, 2],
        [3, -1, 3, 2],
        [4, -1, 3, 1],
        [5, -1, 2, 0],
    ]
    assert prepared.suffix_records.tolist() == [[1, -1, 1, 0]]


RESEARCH = {"family": "research", "relative_bias": True}


def test_next_event_bias_leaves_the_last_row_provisional() -> None:
    p = preparer(layers=RESEARCH, positions="from_start", num_positions=32)
    times = {"time": np.array([100, 130, 120])}
    prepared = p.prepare(request([12, 13, 14], [10, 11], more=times, query_time=200))
    # Columns: item, position, time, next time.
    assert prepared.records.tolist() == [[3, 0, 100, 130], [4, 1, 130, 120]]
    assert prepared.suffix_records.tolist() == [
        [5, 2, 120, 200],
        [1, 3, 200, 200],
        [2, 3, 200, 200],
    ]
    assert suffix(prepared) == {
        "parent": [-1, 0, 0],
        "position": [2, 3, 3],
        "reads_self": [True, True, True],
        "kv_lo": [0, 0, 0],
        "num_fixed": 1,
        "read_row": None,
        "num_candidates": 2,
    }
    assert prepared.num_events == 3


def test_next_event_bias_reads_the_user_from_the_provisional_row() -> None:
    p = preparer(layers=RESEARCH)
    prepared = p.prepare(request([12], more={"time": np.array([100])}, query_time=200))
    assert prepared.length == 0
    assert prepared.suffix_records.tolist() == [[3, 100, 200]]
    assert prepared.suffix_reads_self.tolist() == [True]
    assert prepared.read_row == 0


def test_next_event_bias_on_an_empty_history_has_no_provisional_row() -> None:
    p = preparer(layers=RESEARCH)
    prepared = p.prepare(request([], [10], more={"time": np.array([], np.int64)}, query_time=5))
    assert prepared.length == 0
    assert suffix(prepared)["parent"] == [-1]
    assert suffix(prepared)["num_fixed"] == 0
    assert prepared.suffix_records.tolist() == [[1, 5, 5]]


def test_records_do_not_depend_on_the_query_time_under_a_next_event_bias() -> None:
    p = preparer(layers=RESEARCH)
    times = {"time": np.array([100, 130])}
    one, two = (p.prepare(request([12, 13], more=times, query_time=q)) for q in (200, 300))
    assert one.records.tolist() == two.records.tolist() == [[3, 100, 130]]
    assert one.seed == two.seed
    prefetched = p.prepare(request([12, 13], task=Task.PREFETCH, more=times))
    assert prefetched.records.tolist() == [[3, 100, 130]]


def test_query_time_is_required_where_it_is_read() -> None:
    p = preparer(layers=RESEARCH)
    with pytest.raises(InvalidRequest, match=r"query_time is missing.*clock never replaces"):
        p.prepare(request([12], [10], more={"time": np.array([1])}))
    with pytest.raises(InvalidRequest, match=r"query_time is -1"):
        p.prepare(request([12], [10], more={"time": np.array([1])}, query_time=-1))
    with pytest.raises(InvalidRequest, match=r"history\.time is missing"):
        p.prepare(request([12], [10], query_time=1))
    with pytest.raises(InvalidRequest, match=r"history\.time holds -5"):
        p.prepare(request([12], [10], more={"time": np.array([-5])}, query_time=1))


def test_query_time_is_refused_where_it_is_not_read() -> None:
    with pytest.raises(InvalidRequest, match=r"query_time is 7, but this model does not read it"):
        preparer().prepare(request([12], [10], query_time=7))


# Window and groups


def test_candidates_of_a_window_share_one_rank() -> None:
    p = preparer(layers={"window": 2})
    prepared = p.prepare(request([12, 13, 14], [10, 11, 12]))
    assert prepared.suffix_kv_lo.tolist() == [1, 1, 1]
    assert p.prepare(request([12, 13, 14])).suffix_kv_lo.tolist() == [0]


def test_nvidia_candidates_of_a_window_have_rising_ranks() -> None:
    p = preparer(layers={"family": "nvidia", "window": 2})
    prepared = p.prepare(request([12, 13, 14], [10, 11, 12, 13]))
    assert prepared.suffix_kv_lo.tolist() == [1, 2, 3, 3]


def test_target_groups_are_chains() -> None:
    p = preparer(layers={"family": "nvidia", "target_group_size": 3})
    prepared = p.prepare(request([12], [10, 11, 12, 13, 14], return_user_embedding=True))
    assert prepared.suffix_parent.tolist() == [-1, -1, 1, 2, -1, 4]
    assert prepared.chain_size == 3


# Tasks and arrays


def test_heads_that_the_model_lacks_are_refused() -> None:
    only_rank = preparer(heads={"rank": RankHead(kind="dot")})
    with pytest.raises(InvalidRequest, match="model m has no retrieve head"):
        only_rank.prepare(request([12]))
    with pytest.raises(InvalidRequest, match="model m has no retrieve head"):
        only_rank.prepare(request([12], [10], return_user_embedding=True))
    only_retrieve = preparer(heads={"retrieve": RetrieveHead()})
    with pytest.raises(InvalidRequest, match="model m has no rank head"):
        only_retrieve.prepare(request([12], [10]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request([-3], [10]), r"history\.item holds -3"),
        (request([12], []), r"candidates is empty"),
        (request([12], task=Task.RANK), r"candidates is missing"),
        (request([12], [10], task=Task.RETRIEVE), r"candidates does not go with task retrieve"),
        (request([12], [10], exclude_history=True), r"exclude_history does not go with task rank"),
        (request([12], top_k=0), r"top_k is 0"),
        (request([12], {"item": np.array([[10]])}), r"candidates\.item has shape \[1, 1\]"),
        (request([12], {"item": np.array([1.0])}), r"candidates\.item is float64: give int64"),
        (request([12], {"item": np.array([10]), "x": np.array([1])}), r"candidates holds x"),
        (request([12], {}), r"candidates\.item is missing"),
        (
            Request(request_id="r", user_id="u", task=Task.PREFETCH),
            r"history is missing",
        ),
    ],
)
def test_bad_requests_name_the_field(bad: Request, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        preparer().prepare(bad)


def test_a_request_is_not_modified() -> None:
    item = np.array([12, 99, 13])
    item.setflags(write=False)
    sent = Request(
        request_id="r",
        user_id="u",
        task=Task.RANK,
        history={"item": item},
        candidates={"item": np.array([10])},
    )
    preparer().prepare(sent)
    assert sent.history == {"item": item}
    assert item.tolist() == [12, 99, 13]


def test_weights_version_seeds_the_fingerprint() -> None:
    import msgspec

    p = preparer()
    config = msgspec.structs.replace(p._config, weights_version="2")
    other = Preparer(config, ItemLookup(IDS, 1))
    assert p.prepare(request([12])).seed != other.prepare(request([12])).seed


def delta(item: list[int], base_length: int, *arguments: Any, **options: Any) -> Request:
    """Only the events from `base_length` on; the fingerprint is not the model's business."""
    options = {"base_length": base_length, "base_fingerprint": "0" * 32, **options}
    return request(item, *arguments, **options)


def test_delta_counts_positions_from_the_start_and_leaves_its_base_empty() -> None:
    p = preparer(positions="from_start", num_positions=7)
    prepared = p.prepare(delta([12, 10], 3, [19]))
    assert prepared.records.tolist() == [[0, 0], [0, 0], [0, 0], [3, 3], [1, 4]]
    assert prepared.suffix_records.tolist() == [[10, 5]]
    assert suffix(prepared)["position"] == [5]
    assert (prepared.base_rows, prepared.num_events, prepared.start_event) == (3, 5, 0)
    assert prepared.num_known_events == 5


def test_delta_of_interleaved_events_with_context_begins_after_whole_events() -> None:
    p = preparer(features=(ACTION,), tokens_per_event=2, context=(AGE,))
    actions = {"action": np.array([2])}
    prepared = p.prepare(delta([12, 13], 2, more=actions, context=[4]))
    assert prepared.base_rows == 5
    assert prepared.records.tolist() == [[0, 0, 0]] * 5 + [[3, -1, -1], [-1, 2, -1], [4, -1, -1]]
    assert prepared.suffix_records.tolist() == [[4, -1, -1]], "the open event answers"
    assert suffix(prepared)["kv_lo"] == [0]
    other = p.prepare(delta([12, 13], 2, more=actions, context=[3]))
    assert other.seed != prepared.seed, "the context is not in the records, but in the seed"


def test_delta_is_cut_where_the_whole_history_is() -> None:
    p = preparer(overlong="keep_newest", keep_stride=2)
    # 5 + 2 events, at most 6: the first two are cut, 3 of the base are left.
    prepared = p.prepare(delta([12, 10], 5))
    assert (prepared.start_event, prepared.base_rows, prepared.num_events) == (2, 3, 5)
    later = p.prepare(delta([12, 10], 9, history_start=4))
    assert (later.start_event, later.base_rows) == (6, 3)


@pytest.mark.parametrize(("base_length", "sent"), [(2, 7), (1, 7), (4, 9)])
def test_delta_whose_base_is_cut_away_needs_the_history(base_length: int, sent: int) -> None:
    p = preparer(overlong="keep_newest", keep_stride=2)
    with pytest.raises(HistoryNeeded, match="begins at event"):
        p.prepare(delta([10] * sent, base_length))


def test_delta_of_a_history_that_is_too_long_is_too_large() -> None:
    with pytest.raises(TooLarge, match="history has 7 events, the model serves 6"):
        preparer().prepare(delta([10, 11], 5))


def test_delta_without_events_or_before_its_start_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="history is empty: a delta request sends"):
        preparer().prepare(delta([], 3))
    with pytest.raises(InvalidRequest, match="base_length is 3 and history_start 3"):
        preparer().prepare(delta([10], 3, history_start=3))


@pytest.mark.parametrize("policy", ["drop", "unk"])
def test_known_events_are_counted_to_the_first_unknown_one(policy: str) -> None:
    p = preparer(catalogue={"unknown_history": policy})
    histories = [10, 11], [10, 99, 11, 99], [99, 10]
    assert [p.prepare(request(items)).num_known_events for items in histories] == [2, 1, 0]
    assert p.prepare(delta([10, 99], 3)).num_known_events == 4


def test_delta_of_unknown_items_alone_has_no_row_to_answer_from() -> None:
    with pytest.raises(HistoryNeeded, match="no event of this delta request is known"):
        preparer().prepare(delta([99], 3))
    prepared = preparer().prepare(delta([99], 3, [10]))
    assert (prepared.length, prepared.base_rows, prepared.num_events) == (3, 3, 3)
