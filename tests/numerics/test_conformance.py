"""The conformance command on the published golden files, and on others of the same kinds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from golden_writer import (
    GoldenWriter,
    write_cached,
    write_delta,
    write_full,
    write_incremental,
    write_mfalcon,
)
from safetensors import safe_open
from safetensors.torch import save_file

from engine.attention_backends.reference import ReferenceBackend
from engine.entrypoints.conformance import conformance_command, run_conformance
from engine.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"
BACKENDS = ("cpu", "reference", "torch")


@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_golden_files_pass_on_all_backends(page_size):
    outcomes = run_conformance(GOLDEN, BACKENDS, (page_size,))
    assert not [str(outcome) for outcome in outcomes if outcome.status == "FAIL"]
    skipped = [outcome.file for outcome in outcomes if outcome.status == "skip"]
    assert skipped == ["softmax_qwen3_tiny.safetensors"]
    on_backend = [outcome for outcome in outcomes if outcome.backend in BACKENDS]
    assert len(on_backend) == len(BACKENDS) * 24
    assert sum(outcome.backend == "-" and outcome.status == "ok" for outcome in outcomes) == 2


FULL = {
    "meta": (GoldenWriter("meta_stu", 1, layers=2, d=24, h=3, a=8, v=20, n=300), [70, 1, 131]),
    "meta_targets": (
        GoldenWriter("meta_stu", 2, layers=4, d=32, h=2, a=16, v=8, n=128, alpha=0.1),
        [90, 41, 70],
        [40, 41, 3],
    ),
    "meta_context": (
        GoldenWriter("meta_stu", 3, h=2, n=100, c=5, group_norm=True),
        [80, 9, 30],
        [20, 4, 9],
    ),
    "meta_window": (GoldenWriter("meta_stu", 4, n=90, window=17), [80, 9, 30], [20, 4, 9]),
    "meta_window_context": (
        GoldenWriter("meta_stu", 5, n=90, window=9, c=3),
        [80, 9, 30],
        [20, 4, 9],
    ),
    "research": (
        GoldenWriter("meta_research", 6, layers=3, h=2, a=8, v=16, n=90, use_timestamps=True),
        [90, 1, 40],
    ),
    "research_concat": (GoldenWriter("meta_research", 7, n=70, concat_ua=True), [66, 1, 40]),
    "nvidia_groups": (
        GoldenWriter("nvidia", 8, layers=3, h=4, a=16, n=200, group=5),
        [100, 75, 12],
        [30, 70, 5],
    ),
    "nvidia_context": (GoldenWriter("nvidia", 9, n=77, c=4, group=3), [70, 20, 7], [9, 6, 3]),
    "nvidia_maxlen": (
        GoldenWriter("nvidia", 10, n=95, scaling_seqlen=-1, residual=False),
        [95, 3, 64],
        [20, 3, 1],
    ),
}


@pytest.mark.parametrize("name", FULL)
def test_full_files_of_other_sizes_pass(name, tmp_path):
    write_full(FULL[name][0], tmp_path / "a.safetensors", *FULL[name][1:])
    _assert_passes(tmp_path)


CACHED = {
    "meta": (GoldenWriter("meta_stu", 11, n=256, v=20), [64, 5, 100], 13, [9, 1, 70]),
    "meta_context": (GoldenWriter("meta_stu", 12, n=100, c=3), [40, 3, 67], 0, [9, 1, 20]),
    "nvidia": (GoldenWriter("nvidia", 13, n=170, group=4), [64, 1, 100], 35, [8, 4, 32]),
    "meta_window": (GoldenWriter("meta_stu", 14, n=80, window=20), [64, 1, 30], 9, [8, 4, 16]),
}


@pytest.mark.parametrize("name", CACHED)
def test_cached_files_of_other_sizes_pass(name, tmp_path):
    write_cached(CACHED[name][0], tmp_path / "a.safetensors", *CACHED[name][1:])
    _assert_passes(tmp_path)


def test_incremental_file_of_another_size_passes(tmp_path):
    writer = GoldenWriter("meta_stu", 15, layers=2, n=150, v=20)
    write_incremental(writer, tmp_path / "a.safetensors", [60, 1, 15], 11, 6, 5)
    _assert_passes(tmp_path)


def test_microbatched_file_of_another_size_passes(tmp_path):
    writer = GoldenWriter("meta_stu", 16, n=150, window=40)
    write_mfalcon(writer, tmp_path / "a.safetensors", [66, 1, 15], 21, 8)
    _assert_passes(tmp_path)


def test_delta_file_of_another_size_passes(tmp_path):
    writer = GoldenWriter("meta_research", 17, layers=3, n=80, use_timestamps=True)
    write_delta(writer, tmp_path / "a.safetensors", [79, 1, 40])
    _assert_passes(tmp_path)


def test_bfloat16_file_is_held_against_its_float32_twin(tmp_path):
    writer = GoldenWriter("meta_stu", 18, d=48, h=2, n=16)
    write_full(writer, tmp_path / "one.safetensors", [16, 9], [4, 4])
    config, tensors = _read(tmp_path / "one.safetensors")
    rounded = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    rounded["out"] = torch.zeros_like(rounded["out"])
    _write(tmp_path / "two.safetensors", {**config, "dtype": "bfloat16"}, rounded)
    outcomes = run_conformance(tmp_path, BACKENDS)
    assert [outcome.status for outcome in outcomes] == ["ok"] * 2 * len(BACKENDS)
    assert "mean error" in outcomes[len(BACKENDS)].detail


@pytest.mark.parametrize(
    ("file", "tensor"),
    [
        ("stu_3layer_targets", "out"),
        ("stu_3layer_cached_targets", "delta_out"),
        ("stu_3layer_cached_targets", "k_cache.2"),
        ("stu_3layer_incremental", "r3.delta_out"),
        ("stu_3layer_incremental", "final_v_cache.0"),
        ("stu_3layer_mfalcon", "cand_out_microbatched"),
        ("research_3layer_delta", "out_delta"),
        ("research_3layer_rab", "timestamps"),
        ("research_e2e_retrieval", "user_embedding"),
        ("research_e2e_retrieval", "top10_ids_excluding_history"),
        ("nv_3layer_candidates", "v.1"),
        ("nv_native_layout", "block_bias"),
        ("nv_native_layout", "k"),
        ("input_stage", "meta_clip.out"),
        ("input_stage", "meta_edge.time_index"),
        ("input_stage", "nv.chunk2.out"),
        ("input_stage", "interleave.token_time"),
        ("input_stage", "interleave_append.token_id"),
    ],
)
def test_file_with_one_wrong_tensor_fails(file, tensor, tmp_path):
    config, tensors = _read(GOLDEN / f"{file}.safetensors")
    wrong = tensors[tensor].clone()
    if tensor == "interleave.token_time":
        wrong += 10_000
    elif tensor == "timestamps":
        wrong[:, 1:] += 100_000
    else:
        wrong.view(-1)[min(20, wrong.numel() - 1)] += 1
    _write(tmp_path / "some.safetensors", config, {**tensors, tensor: wrong})
    shutil.copy(GOLDEN / "nv_3layer_candidates.safetensors", tmp_path / "other.safetensors")
    outcomes = run_conformance(tmp_path, ["torch"])
    by_file = {outcome.file: outcome.status for outcome in outcomes}
    assert by_file == {"some.safetensors": "FAIL", "other.safetensors": "ok"}


def test_command_says_what_failed_and_returns_one(tmp_path, capsys):
    config, tensors = _read(GOLDEN / "stu_1layer_hist_N16.safetensors")
    _write(tmp_path / "x.safetensors", config, {**tensors, "out": tensors["out"] + 1})
    assert conformance_command(tmp_path, ["torch"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL x.safetensors" in printed
    assert "out differs by 1.00e+00" in printed
    assert "0 passed, 1 failed, 0 skipped" in printed


def test_command_returns_zero_on_a_good_folder(tmp_path, capsys):
    shutil.copy(GOLDEN / "nv_2layer_noresidual.safetensors", tmp_path)
    shutil.copy(GOLDEN / "softmax_qwen3_tiny.safetensors", tmp_path)
    assert conformance_command(tmp_path, page_size=3) == 0
    printed = capsys.readouterr().out
    assert "3 passed, 0 failed, 1 skipped" in printed
    assert "decoder" in printed


@pytest.mark.parametrize("name", ["research_1layer_rab", "research_e2e_retrieval"])
def test_file_that_the_backend_does_not_serve_is_skipped(name, tmp_path, monkeypatch):
    monkeypatch.setattr(ReferenceBackend, "biases", ())
    shutil.copy(GOLDEN / f"{name}.safetensors", tmp_path)
    [outcome] = run_conformance(tmp_path, ["reference"])
    assert (outcome.status, outcome.detail) == ("skip", "has no research bias")


def test_unknown_kind_fails_instead_of_being_skipped(tmp_path):
    config, tensors = _read(GOLDEN / "stu_1layer_hist_N16.safetensors")
    _write(tmp_path / "x.safetensors", {**config, "kind": "beam"}, tensors)
    [outcome] = run_conformance(tmp_path, ["torch"])
    assert outcome.status == "FAIL"
    assert "'beam'" in outcome.detail


def test_truncated_file_fails_and_others_still_run(tmp_path):
    whole = (GOLDEN / "stu_1layer_hist_N16.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.safetensors").write_bytes(whole)
    statuses = [outcome.status for outcome in run_conformance(tmp_path, ["torch"])]
    assert statuses == ["FAIL", "ok"]


def test_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no \.safetensors"):
        run_conformance(tmp_path)


def test_unknown_backend_is_an_error():
    with pytest.raises(ConfigError, match="'tpu' is not registered"):
        run_conformance(GOLDEN, ["tpu"])


def _assert_passes(folder):
    outcomes = run_conformance(folder, BACKENDS, (1, 16, 32))
    assert [outcome.status for outcome in outcomes] == ["ok"] * len(BACKENDS), [
        str(o) for o in outcomes
    ]


def _read(path):
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["config"])
        return config, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def _write(path, config, tensors):
    save_file(tensors, path, {"config": json.dumps(config)})
