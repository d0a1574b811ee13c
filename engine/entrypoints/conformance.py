"""`mtserve conformance`: golden files through the engine's own runner, pages and backends.

A line per file and backend with the largest error; what is skipped says why. The tolerance is
atol 5e-5, rtol 1e-4 for float32 files; bfloat16 files are held against their float32 twin by mean
error, at most 0.04.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from engine.attention_backends.registry import attention_spec, backend_class
from engine.entrypoints.golden_file import GoldenFile, read_config, read_file
from engine.entrypoints.golden_inputs import check_input_stage, check_layout
from engine.entrypoints.golden_kinds import (
    LAYER_KINDS,
    Comparison,
    StackCheck,
    check_retrieval,
    retrieval_model,
)
from engine.entrypoints.golden_run import Variant
from engine.errors import ConfigError, EngineError
from engine.models.hstu.model import HstuModel

DEFAULT_BACKENDS = ("cpu", "reference", "torch")
DEFAULT_PAGE_SIZES = (16,)
DEFAULT_PIECE_SIZE = 7
BFLOAT16_MEAN_ERROR = 0.04

_HSTU_FAMILIES = ("meta_stu", "meta_research", "nvidia")
_KINDS = (*LAYER_KINDS, "e2e")


class Outcome(NamedTuple):
    """What became of one file on one backend ("-" where none takes part).

    status: "ok", "FAIL" or "skip". error: the largest error over all runs of the file.
    """

    file: str
    backend: str
    status: str
    error: float
    detail: str

    def __str__(self) -> str:
        measured = "" if self.status == "skip" else f"error {self.error:.2e}"
        return f"{self.status:<5}{self.file:<44} {self.backend:<10} {measured:<15} {self.detail}"


def run_conformance(
    golden: Path,
    backends: Sequence[str] = DEFAULT_BACKENDS,
    page_sizes: Sequence[int] = DEFAULT_PAGE_SIZES,
    piece_size: int = DEFAULT_PIECE_SIZE,
) -> list[Outcome]:
    """Run every golden file of a folder.

    Args:
        golden: Folder of `.safetensors` files; files in folders below are not golden files.
        backends: Registered names.
        page_sizes: Each layer file runs with each of them.
        piece_size: Histories run in one piece and, where the model allows it, in pieces of this
            many rows.

    Raises ConfigError when the folder holds no file, or a backend is not there.
    """
    return list(_outcomes(golden, backends, page_sizes, piece_size))


def conformance_command(
    golden: Path,
    backend: Sequence[str] = (),
    page_size: int = DEFAULT_PAGE_SIZES[0],
    piece_size: int = DEFAULT_PIECE_SIZE,
) -> int:
    """The command: prints the outcomes as they come; returns the exit status, 1 on any failure."""
    counts = {"ok": 0, "FAIL": 0, "skip": 0}
    for outcome in _outcomes(golden, backend or DEFAULT_BACKENDS, (page_size,), piece_size):
        print(outcome, flush=True)
        counts[outcome.status] += 1
    print(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} skipped")
    return 1 if counts["FAIL"] or not counts["ok"] else 0


def _outcomes(
    golden: Path, backends: Sequence[str], page_sizes: Sequence[int], piece_size: int
) -> Iterator[Outcome]:
    paths = sorted(golden.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{golden} holds no .safetensors file: give the folder of golden files")
    if min(page_sizes) < 1 or piece_size < 1:
        raise ConfigError(f"page sizes {list(page_sizes)}, piece size {piece_size}: give 1 or more")
    for backend in backends:
        backend_class(backend)
    for path in paths:
        yield from _File(path, paths).outcomes(backends, page_sizes, piece_size)


class _File:
    """One file of the folder, next to the others."""

    def __init__(self, path: Path, paths: Sequence[Path]) -> None:
        self._path = path
        self._others = [other for other in paths if other != path]

    def outcomes(
        self, backends: Sequence[str], page_sizes: Sequence[int], piece_size: int
    ) -> Iterator[Outcome]:
        """One per backend, or one in all where no backend takes part."""
        try:
            raw = read_config(self._path)
            if raw is None:
                yield self._skipped("-", "no metadata key `config`: not a golden file")
                return
            if raw.get("family") == "softmax_qwen3":
                yield self._skipped("-", "a softmax decoder: the engine serves no decoders yet")
                return
            file = read_file(self._path)
        except ConfigError as error:
            yield Outcome(self._path.name, "-", "FAIL", 0.0, error.message)
            return
        if file.config.family == "input_stage":
            yield self._checked("-", lambda compare: check_input_stage(file, compare), Comparison())
            return
        if file.config.kind == "layout":
            siblings = self._layer_files()
            yield self._checked(
                "-", lambda compare: check_layout(file, siblings, compare), Comparison()
            )
            return
        if file.config.family not in _HSTU_FAMILIES or file.config.kind not in _KINDS:
            reason = f"family {file.config.family!r}, kind {file.config.kind!r} is not known"
            yield Outcome(self._path.name, "-", "FAIL", 0.0, reason)
            return
        for backend in backends:
            yield self._on_backend(file, raw, backend, page_sizes, piece_size)

    def _on_backend(
        self,
        file: GoldenFile,
        raw: Mapping[str, object],
        backend: str,
        page_sizes: Sequence[int],
        piece_size: int,
    ) -> Outcome:
        compare, notes = Comparison(), [f"page size {', '.join(map(str, page_sizes))}"]
        if file.config.dtype == "bfloat16":
            compare.mean_bound = BFLOAT16_MEAN_ERROR
            twin = self._float32_twin(raw)
            notes.append("mean error" if twin else "mean error, no float32 twin: its own output")
            file = file if twin is None else _with_outputs_of(file, twin)
        variants = [
            Variant(backend, page_size, pieces)
            for page_size in page_sizes
            for pieces in (0, piece_size)
        ]

        def check(compare: Comparison) -> list[str]:
            is_cut = [_run_layers(file, variant, compare) for variant in variants]
            cut = f"in one piece and in pieces of {piece_size}"
            return [*notes, cut if any(is_cut) else "in one piece (the model cannot be cut)"]

        return self._checked(backend, check, compare)

    def _checked(
        self,
        backend: str,
        check: Callable[[Comparison], list[str]],
        compare: Comparison,
    ) -> Outcome:
        """Run a check that returns notes; whatever it raises is the file's failure."""
        try:
            notes = check(compare)
        except _UnservedError as error:
            return self._skipped(backend, error.message)
        except Exception as error:
            reason = error.message if isinstance(error, EngineError) else repr(error)
            return Outcome(self._path.name, backend, "FAIL", compare.max_error, reason)
        status = "FAIL" if compare.failures else "ok"
        shown = list(dict.fromkeys(compare.failures))[:4] if compare.failures else notes
        return Outcome(self._path.name, backend, status, compare.max_error, "; ".join(shown))

    def _skipped(self, backend: str, reason: str) -> Outcome:
        return Outcome(self._path.name, backend, "skip", 0.0, reason)

    def _float32_twin(self, raw: Mapping[str, object]) -> GoldenFile | None:
        """The file whose description differs in the dtype alone."""
        wanted = {**raw, "dtype": "float32"}
        for path in self._others:
            if _described(path) == wanted:
                return read_file(path)
        return None

    def _layer_files(self) -> Iterator[GoldenFile]:
        for path in self._others:
            raw = _described(path)
            if raw is not None and raw.get("family") == "nvidia" and raw.get("kind") in _KINDS:
                yield read_file(path)


class _UnservedError(ConfigError):
    """The backend does not serve the file's model."""


def _described(path: Path) -> Mapping[str, object] | None:
    """The file's description; None when it has none or cannot be read (its own line says so)."""
    try:
        return read_config(path)
    except ConfigError:
        return None


def _run_layers(file: GoldenFile, variant: Variant, compare: Comparison) -> bool:
    """One variant of a layer file; returns whether its histories were cut."""
    if file.config.kind == "e2e":
        model = retrieval_model(file)
        _refuse_unserved(model, variant)
        check_retrieval(file, model, variant, compare)
    else:
        check = StackCheck(file, variant, compare)
        model = check.model
        _refuse_unserved(model, variant)
        LAYER_KINDS[file.config.kind](check)
    return variant.piece_size > 0 and not model.spec.has_bidirectional_context


def _refuse_unserved(model: HstuModel, variant: Variant) -> None:
    spec = attention_spec(model.spec, variant.page_size)
    reasons = backend_class(variant.backend).validate(spec)
    if reasons:
        raise _UnservedError("; ".join(reasons))


def _with_outputs_of(file: GoldenFile, twin: GoldenFile) -> GoldenFile:
    """The file with the outputs of its twin to compare with."""
    outputs = {
        name: tensor
        for name, tensor in twin.tensors.items()
        if name.split(".")[-1].endswith(("out", "out_microbatched"))
    }
    return replace(file, tensors={**file.tensors, **outputs})
