"""`mtserve evaluate` against the training code's own measurement of the same model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from small_logs import NUM_USERS, write_log

from engine.entrypoints import evaluate
from engine.entrypoints.logs import by_user, k_core, read_log
from engine.errors import ConfigError, InvalidRequest
from examples.movielens.train import Quality, TrainOptions, export, measure, train

TRAIN = TrainOptions(hidden_size=16, head_dim=8, num_positions=65, scale_length=32, epochs=8)


class Trained(NamedTuple):
    log: Path
    model: Path
    quality: Quality


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory = tmp_path_factory.mktemp("trained")
    log = write_log(directory / "log.dat")
    recommender, sequences = train(by_user(k_core(read_log(log), 5)), TRAIN)
    export(recommender, sequences, directory / "model")
    quality = measure(recommender, sequences, on_validation=False)
    return Trained(log, directory / "model", quality)


@pytest.fixture
def options(trained: Trained) -> evaluate.EvaluateOptions:
    return evaluate.EvaluateOptions(
        model=str(trained.model),
        data=str(trained.log),
        device_pages=60,
        page_size=4,
        chunk_size=8,
        host_bytes=1 << 20,
        threads=1,
    )


@pytest.mark.parametrize("cache", ["off", "device", "tiered"])
def test_quality_equals_the_training_codes_in_every_cache_mode(
    cache: str, options: evaluate.EvaluateOptions, trained: Trained
) -> None:
    report = evaluate.run(msgspec.structs.replace(options, cache=cache))

    assert (report.num_hits, report.num_users) == (trained.quality.num_hits, NUM_USERS)
    assert 0 < report.num_hits < NUM_USERS
    assert report.hr_at_10 == trained.quality.hr_at_10
    assert report.ndcg_at_10 == pytest.approx(trained.quality.ndcg_at_10, abs=1e-12)
    assert (report.num_requests, report.cache) == (3 * NUM_USERS, cache)


def test_tokens_by_tier_add_up_and_follow_the_cache_mode(
    options: evaluate.EvaluateOptions,
) -> None:
    reports = {
        cache: evaluate.run(msgspec.structs.replace(options, cache=cache)).tokens
        for cache in ("off", "device", "tiered")
    }

    for tokens in reports.values():
        assert tokens.history == reports["off"].history
        assert tokens.device + tokens.host + tokens.computed == tokens.history
    assert reports["off"].computed == reports["off"].history
    assert reports["device"].device > 0
    assert reports["device"].host == 0
    assert reports["tiered"].host > 0
    assert reports["tiered"].computed < reports["device"].computed


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_rounds_change_the_requests_and_not_the_quality(
    rounds: int, options: evaluate.EvaluateOptions, trained: Trained
) -> None:
    report = evaluate.run(msgspec.structs.replace(options, rounds=rounds))

    assert report.num_requests == rounds * NUM_USERS
    assert report.num_hits == trained.quality.num_hits


def test_growing_lengths_end_with_the_whole_history() -> None:
    lengths = [evaluate.growing_length(10, number, 3) for number in (1, 2, 3)]

    assert lengths == [4, 7, 10]


def test_progress_counts_all_requests(options: evaluate.EvaluateOptions) -> None:
    progress: list[tuple[int, int]] = []

    evaluate.run(options, lambda done, total: progress.append((done, total)))

    assert progress[-1] == (3 * NUM_USERS, 3 * NUM_USERS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": 0}, "rounds is 0"),
        ({"min_count": 2}, "leave-last-out needs 3"),
        ({"device_pages": 0}, "device_pages is 0"),
    ],
)
def test_options_that_cannot_work_are_refused(
    change: dict[str, int], message: str, options: evaluate.EvaluateOptions
) -> None:
    with pytest.raises(ConfigError, match=message):
        msgspec.structs.replace(options, **change)


def test_a_core_that_is_empty_is_a_typed_error(options: evaluate.EvaluateOptions) -> None:
    with pytest.raises(InvalidRequest, match="min_count 1000"):
        evaluate.run(msgspec.structs.replace(options, min_count=1000))


UNKNOWN = (1001, 1002, 1003, 1004, 1005)


def _lines(user: str, items: tuple[int, ...]) -> str:
    return "".join(f"{user}::{item}::1::{2000 + 60 * n}\n" for n, item in enumerate(items))


def test_a_user_without_any_known_item_is_skipped_and_counted(
    options: evaluate.EvaluateOptions, trained: Trained, tmp_path: Path
) -> None:
    log = tmp_path / "log.dat"
    log.write_text(trained.log.read_text() + "".join(_lines(f"x{n}", UNKNOWN) for n in range(5)))

    report = evaluate.run(msgspec.structs.replace(options, data=str(log)))

    assert (report.num_users, report.num_skipped) == (NUM_USERS, 5)
    assert report.num_hits == trained.quality.num_hits
    assert report.hr_at_10 == trained.quality.hr_at_10
    assert report.num_requests == 3 * NUM_USERS
    assert report.first_skipped is not None
    assert report.first_skipped.startswith("user x")
    assert "history has no event that the model knows" in report.first_skipped


def test_a_user_whose_first_round_has_no_known_item_is_evaluated_by_the_last(
    options: evaluate.EvaluateOptions, trained: Trained, tmp_path: Path
) -> None:
    known = tuple(7 * item + 3 for item in range(4))
    log = tmp_path / "log.dat"
    late_users = "".join(_lines(f"late{n}", UNKNOWN + known) for n in range(5))
    log.write_text(trained.log.read_text() + late_users)

    report = evaluate.run(msgspec.structs.replace(options, data=str(log)))
    in_one_round = evaluate.run(msgspec.structs.replace(options, data=str(log), rounds=1))

    assert (report.num_users, report.num_skipped, report.first_skipped) == (NUM_USERS + 5, 0, None)
    # Of 8 events of history, the first round sends 3, all of them unknown.
    assert report.num_requests == 3 * NUM_USERS + 2 * 5
    assert report.num_hits == in_one_round.num_hits
    assert report.ndcg_at_10 == in_one_round.ndcg_at_10


def test_a_log_of_unknown_items_alone_is_a_typed_error(
    options: evaluate.EvaluateOptions, tmp_path: Path
) -> None:
    log = tmp_path / "log.dat"
    log.write_text("".join(_lines(f"x{n}", UNKNOWN) for n in range(5)))

    with pytest.raises(InvalidRequest, match="all 5 are refused; user x0: history has no event"):
        evaluate.run(msgspec.structs.replace(options, data=str(log)))
