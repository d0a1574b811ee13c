"""Which copy engine serves, with and without the native library."""

from __future__ import annotations

import logging

import pytest

import engine
from engine.errors import ConfigError
from engine.native_library import find_library, load_library
from engine.transfer.native import NativeCopyEngine
from engine.transfer.python import PythonCopyEngine
from engine.transfer.select import make_copy_engine


@pytest.fixture
def parts(native_rig):
    return native_rig.pools, native_rig.arena, native_rig.wake


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """The package as it is installed without a compiler."""
    monkeypatch.setattr(engine, "__path__", [str(tmp_path)])
    return tmp_path


def test_auto_takes_the_native_workers_when_they_are_there(parts, caplog):
    copies = make_copy_engine("auto", *parts)
    assert isinstance(copies, NativeCopyEngine)
    assert caplog.records == []
    copies.close()


def test_python_is_taken_when_asked_for(parts):
    copies = make_copy_engine("python", *parts)
    assert isinstance(copies, PythonCopyEngine)
    copies.close()


def test_auto_falls_back_without_the_library_and_says_so_once(parts, no_library, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            copies = make_copy_engine("auto", *parts)
            assert isinstance(copies, PythonCopyEngine)
            copies.close()
    assert len(caplog.records) == 1
    assert "without a C++ compiler" in caplog.text
    assert str(no_library) in caplog.text


def test_native_is_refused_without_the_library(parts, no_library):
    with pytest.raises(ConfigError, match=r"workers is 'native', but _engine_cpu.so is not in"):
        make_copy_engine("native", *parts)
    with pytest.raises(ConfigError, match="use workers 'python'"):
        NativeCopyEngine(*parts)


def test_a_library_that_cannot_be_loaded_is_a_reason(no_library):
    (no_library / "_engine_cpu.so").write_bytes(b"not a library")
    assert "_engine_cpu.so cannot be loaded" in load_library()


def test_the_first_folder_with_a_library_wins(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (second / "_engine_cpu.so").touch()
    assert find_library([str(first), str(second)]) == second / "_engine_cpu.so"
    assert find_library([str(first)]) is None
