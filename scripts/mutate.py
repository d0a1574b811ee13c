"""Break the cache contract on purpose, one fault at a time, and see a named test go red.

    python scripts/mutate.py            # all faults
    python scripts/mutate.py NAME ...   # some of them

Each fault is applied to a copy of the tree; the test named beside it must pass without the fault
and fail with it. Exits 1 if a fault goes unnoticed, or does not apply any more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import engine

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("engine", "tests", "pyproject.toml")
RUN_PYTEST = (
    "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Redirecting' not in "
    "type(f).__name__]; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)


class Fault(NamedTuple):
    """Replace `old` by `new` in `file` (`old` occurs once); `test` must notice."""

    name: str
    file: str
    old: str
    new: str
    test: str


EXACT = "tests/numerics/test_cache_exactness.py::test_"
DELTA = "tests/unit/core/test_delta.py::test_"
COPIES = "tests/unit/block_manager/test_copies.py::test_"

FAULTS = [
    Fault(
        "skip_the_fingerprint",
        "engine/block_manager/fingerprint.py",
        "    if last >= first and hashes[last] != chain.boundaries[last]:\n",
        "    if False:\n",
        f"{EXACT}edited_event_is_not_served_from_the_old_state",
    ),
    Fault(
        "trust_the_length_of_the_tail",
        "engine/block_manager/fingerprint.py",
        "    if length % page_size == 0 or chain.at(length) == tail_hash:\n",
        "    if True:\n",
        f"{EXACT}edit_inside_the_last_partial_page_is_noticed_when_the_history_grows",
    ),
    Fault(
        "hash_one_input_less",
        "engine/block_manager/fingerprint.py",
        "        rows = np.ascontiguousarray(records)\n",
        "        rows = np.ascontiguousarray(records[:, :-1])\n",
        "tests/unit/block_manager/test_fingerprint.py"
        "::test_every_changed_input_changes_every_later_hash",
    ),
    Fault(
        "leave_the_seed_out",
        "engine/block_manager/fingerprint.py",
        "        start = xxh3_64_intdigest(seed)\n",
        '        start = xxh3_64_intdigest(b"")\n',
        f"{EXACT}exact_mode_reuses_only_the_same_history",
    ),
    Fault(
        "attend_before_the_wait",
        "engine/runner/layers.py",
        "            self._waits.wait(layer)\n",
        "            self._waits.wait(0)\n",
        "tests/numerics/test_onload_order.py::test_a_layer_is_read_only_after_its_own_onload",
    ),
    Fault(
        "publish_before_the_copy_is_complete",
        "engine/block_manager/state_copies.py",
        "        state.offload_len = target\n",
        "        state.offload_len = state.host_len = target\n",
        f"{COPIES}host_len_rises_page_by_page_as_an_offload_proceeds",
    ),
    Fault(
        "let_host_length_rise_past_a_hole",
        "engine/block_manager/state_copies.py",
        "        if layout.page_start(job.first_page) > state.host_len:\n            return\n",
        "",
        f"{COPIES}host_length_never_rises_past_a_hole_that_a_failure_left",
    ),
    Fault(
        "count_a_job_of_an_old_branch",
        "engine/block_manager/state_copies.py",
        "        if not state.is_attached or job.branch != state.branch:\n",
        "        if not state.is_attached:\n",
        f"{COPIES}an_offload_of_an_old_branch_counts_for_nothing",
    ),
    Fault(
        "forget_leaves_a_chunk",
        "engine/block_manager/tiers.py",
        "            chunks.setdefault(state.accounts, []).append(state.empty())\n",
        "            chunks.setdefault(state.accounts, []).append(state.empty()[1:])\n",
        f"{EXACT}forgotten_user_starts_from_nothing",
    ),
    Fault(
        "kv_hi_off_by_one",
        "engine/runner/batch.py",
        "    suffix_hi = np.full(len(suffix), prepared.length, np.int32)\n",
        "    suffix_hi = np.full(len(suffix), prepared.length + 1, np.int32)\n",
        f"{EXACT}shorter_history_is_served_and_the_state_kept",
    ),
    Fault(
        "reuse_a_page_while_a_copy_reads_it",
        "engine/block_manager/copies_in_flight.py",
        "        self._pages.retain(job.pages)\n",
        "        self._pages.retain(job.pages)\n"
        "        self._pages.release(job.pages, record.state.accounts.device)\n",
        f"{COPIES}pages_of_a_running_offload_are_not_reused_after_a_divergence",
    ),
    Fault(
        "keep_the_page_where_a_history_diverges",
        "engine/block_manager/fingerprint.py",
        "    return Match(matched=common * page_size, is_prefix=False, diverges=True)\n",
        "    return Match(matched=length, is_prefix=False, diverges=False)\n",
        f"{EXACT}edit_inside_the_last_partial_page_is_noticed_when_the_history_grows",
    ),
    Fault(
        "take_a_delta_without_its_base",
        "engine/scheduler/scheduler.py",
        "        if lookup.matched < prepared.base_rows:\n",
        "        if lookup.matched < 0:\n",
        f"{DELTA}wrong_base_leaves_the_users_state_alone",
    ),
    Fault(
        "let_a_wrong_base_cut_the_state",
        "engine/block_manager/fingerprint.py",
        "            return NO_MATCH\n",
        "            return Match(matched=0, is_prefix=False, diverges=True)\n",
        "tests/unit/block_manager/test_fingerprint_base.py"
        "::test_state_without_the_base_does_not_diverge",
    ),
    Fault(
        "take_a_delta_of_another_profile",
        "engine/scheduler/delta.py",
        "    if shown.seed != chain.seed_hash:\n",
        "    if False:\n",
        f"{DELTA}other_context_is_refused_and_harms_nothing",
    ),
    Fault(
        "start_a_delta_after_an_unknown_event",
        "engine/scheduler/delta.py",
        "    num_events = min(prepared.num_events - 1, prepared.num_known_events)\n",
        "    num_events = prepared.num_events - 1\n",
        f"{DELTA}base_lies_before_the_first_unknown_event",
    ),
    Fault(
        "take_a_catalogue_with_a_changed_row",
        "engine/models/growth.py",
        "        if torch.equal(had, has):\n",
        "        if len(had) == len(has):\n",
        "tests/unit/models/test_catalogue_growth.py::test_zero_with_another_sign_is_a_changed_row",
    ),
]


def copy_tree(target: Path) -> None:
    """The tree as it is, with the native library beside the sources."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy(source, target / name)
    for folder in engine.__path__:
        for library in Path(folder).glob("_engine_*.so"):
            shutil.copy(library, target / "engine" / library.name)


def run(tree: Path, test: str) -> bool:
    """Whether the test passes on the tree."""
    options = ["-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider", test]
    finished = subprocess.run(
        [sys.executable, "-c", RUN_PYTEST, *options],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if finished.returncode not in (0, 1):
        sys.exit(f"{test} could not be run:\n{finished.stdout[-3000:]}")
    return finished.returncode == 0


def is_noticed(tree: Path, fault: Fault) -> bool:
    """Apply the fault, run its test, take the fault back."""
    file = tree / fault.file
    before = file.read_text()
    if before.count(fault.old) != 1:
        sys.exit(f"{fault.name}: {fault.file} does not hold the line to change exactly once")
    file.write_text(before.replace(fault.old, fault.new))
    try:
        return not run(tree, fault.test)
    finally:
        file.write_text(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="faults to apply; all of them without any")
    wanted = parser.parse_args().names
    unknown = set(wanted) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    faults = [fault for fault in FAULTS if not wanted or fault.name in wanted]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        for test in sorted({fault.test for fault in faults}):
            if not run(tree, test):
                sys.exit(f"{test} fails without any fault")
        for fault in faults:
            noticed = is_noticed(tree, fault)
            print(
                f"{'noticed ' if noticed else 'SURVIVED'} {fault.name}  by {fault.test}", flush=True
            )
            if not noticed:
                survivors.append(fault.name)
    print(f"{len(faults) - len(survivors)} of {len(faults)} faults noticed")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
