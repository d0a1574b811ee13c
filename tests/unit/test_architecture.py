"""Which module may import which, checked on the sources."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "engine"

# From the ground up. A module may import its own package and anything on a lower level, nothing
# beside it and nothing above. The longest matching name counts.
LEVELS = [
    {"errors", "metrics", "native_fakes", "version"},
    {"config", "native_library", "transitions", "types", "plugins"},
    # Contracts: what a package promises, without the package.
    {"attention_backends.base", "attention_backends.native_step"},
    {"commands", "models.base", "models.config", "transfer.jobs"},
    {"core_watch", "platforms"},
    {"block_manager", "transfer", "attention_backends", "models"},
    {"scheduler", "runner"},
    {"core_dump", "core_parts", "meter"},
    {"weights"},
    {"user_reports"},
    {"controls"},
    {"core"},
    {"model_loading", "warm_up"},
    {"assembly", "ipc", "request_builder"},
    {"engine", "core_loop"},
    {"core_process"},
    {"core_launch"},
    {"core_client"},
    {"async_engine", "testing"},
    {"entrypoints"},
]
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
ASYNCIO_ALLOWED = ("async_engine", "core_client", "entrypoints")  # core_client: its inside
WITHOUT_TORCH = ("scheduler", "block_manager", "types", "errors", "config", "metrics")


def _module_name(path: Path) -> str:
    """engine/models/base.py -> "models.base"; a package's __init__ is the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    _module_name(path): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"  # it re-exports from above, when asked
}


def _imports(path: Path) -> set[str]:
    """Full names of all imported modules, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            found.add(node.module)
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in submodules if name.removeprefix("engine.") in MODULES}
    return found


def _known_name(module: str) -> str:
    """The longest name in LEVELS that the module is or lies in."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in LEVEL_OF:
            return name
    raise AssertionError(f"engine.{module} has no level: add it to LEVELS")


def _violations(module: str, imported: set[str]) -> list[str]:
    own = _known_name(module)
    wrong = []
    for target in sorted(imported):
        if not target.startswith("engine.") or target.removeprefix("engine.") not in MODULES:
            continue
        other = _known_name(target.removeprefix("engine."))
        is_own_package = other.split(".")[0] == own.split(".")[0]
        if not is_own_package and LEVEL_OF[other] >= LEVEL_OF[own]:
            wrong.append(f"engine.{module} must not import {target}")
    return wrong


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    assert _violations(module, _imports(MODULES[module])) == []


def test_an_import_against_the_direction_is_found():
    assert _violations("scheduler.queue", {"engine.core", "engine.types"}) == [
        "engine.scheduler.queue must not import engine.core"
    ]
    assert _violations("block_manager.manager", {"engine.transfer.native"}) == [
        "engine.block_manager.manager must not import engine.transfer.native"
    ]


@pytest.mark.parametrize("module", MODULES)
def test_asyncio_stays_at_the_edge(module):
    if module.split(".")[0] not in ASYNCIO_ALLOWED:
        assert not _imports(MODULES[module]) & {"asyncio", "uvloop"}


def _loaded_after(*modules: str) -> set[str]:
    script = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_import_engine_loads_no_torch():
    assert not _loaded_after("engine") & {"torch", "asyncio"}


def test_numbers_and_lists_load_neither_torch_nor_asyncio():
    names = [f"engine.{module}" for module in MODULES if module.split(".")[0] in WITHOUT_TORCH]
    assert len(names) > len(WITHOUT_TORCH)
    assert not _loaded_after(*names) & {"torch", "asyncio"}


def test_the_version_heads_the_changelog():
    from engine.version import __version__

    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest is not None
    assert latest[1] == __version__
