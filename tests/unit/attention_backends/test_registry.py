"""Backends are found by name; what cannot work is a start-up error that says why."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.attention_backends.base import AttentionSpec
from engine.attention_backends.native import CpuBackend
from engine.attention_backends.reference import ReferenceBackend
from engine.attention_backends.registry import (
    backend_class,
    backend_names,
    create_backend,
)
from engine.attention_backends.torch_tiles import TorchBackend
from engine.errors import ConfigError


def _spec(**changes):
    values = {
        "platform": "cpu", "dtype": torch.float32, "num_heads": 2, "num_kv_heads": 2, "qk_dim": 8,
        "v_dim": 8, "page_size": 16, "score": "silu", "alpha": 0.5, "bias": None,
    }  # fmt: skip
    return AttentionSpec(**{**values, **changes})


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name, entry points text, module source) makes a distribution importable."""

    def install(name, entries, source=""):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[engine.attention_backends]\n{entries}\n")
        (tmp_path / f"{name}_module.py").write_text(source)

    monkeypatch.syspath_prepend(str(tmp_path))
    return install


def test_built_in_backends_are_listed():
    assert {"cpu", "reference", "torch"} <= set(backend_names())


def test_auto_on_cpu_takes_the_native_kernels_and_logs_why(caplog):
    with caplog.at_level(logging.INFO):
        assert isinstance(create_backend("auto", _spec()), CpuBackend)
    assert "attention backend cpu: chosen for cpu (first choice)" in caplog.text


def test_auto_without_the_native_library_takes_torch_and_says_why(caplog, monkeypatch):
    missing = "the library is not there"
    monkeypatch.setattr("engine.attention_backends.native.load_library", lambda: missing)
    with caplog.at_level(logging.INFO):
        assert isinstance(create_backend("auto", _spec()), TorchBackend)
    assert f"attention backend torch: chosen for cpu (cpu: {missing})" in caplog.text
    with pytest.raises(ConfigError, match=missing):
        create_backend("cpu", _spec())


def test_auto_without_a_backend_for_the_platform_says_so():
    with pytest.raises(ConfigError, match="no attention backend serves this model on cuda"):
        create_backend("auto", _spec(platform="cuda"))


def test_named_backend_that_cannot_serve_lists_every_reason():
    with pytest.raises(ConfigError) as raised:
        create_backend("reference", _spec(platform="cuda", dtype=torch.float16))
    assert "runs on cpu, not on cuda" in raised.value.message
    assert "serves float32, bfloat16, not float16" in raised.value.message


def test_missing_backend_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"'flash' is not registered.*reference.*torch"):
        create_backend("flash", _spec())


def test_options_go_to_the_backend():
    backend = create_backend("torch", _spec(), {"group_bytes": 1 << 20})
    assert isinstance(backend, TorchBackend)


def test_unknown_option_is_refused():
    with pytest.raises(ConfigError, match="does not take the options"):
        create_backend("torch", _spec(), {"tiles": 3})


def test_plug_in_is_found_by_its_name(install):
    install(
        "plugin",
        "mine = plugin_module:make",
        "from engine.attention_backends.reference import ReferenceBackend\n"
        "class Mine(ReferenceBackend):\n    name = 'mine'\n"
        "def make():\n    return Mine\n",
    )
    assert "mine" in backend_names()
    backend = create_backend("mine", _spec())
    assert isinstance(backend, ReferenceBackend)
    assert backend.name == "mine"


def test_plug_in_that_fails_to_load_is_loud(install):
    install("fails", "failing = fails_module:make", "raise ImportError('no such GPU library')\n")
    with pytest.raises(ConfigError, match=r"'failing' of fails .*no such GPU library"):
        create_backend("failing", _spec())


def test_plug_in_whose_factory_returns_something_else_is_refused(install):
    install("wrong", "wrong = wrong_module:make", "def make():\n    return 3\n")
    with pytest.raises(ConfigError, match="is no AttentionBackend"):
        backend_class("wrong")


def test_plug_in_under_a_built_in_name_is_refused(install):
    install("rival", "torch = rival_module:make", "def make():\n    return None\n")
    with pytest.raises(ConfigError, match="registered by rival and by mtserve"):
        backend_class("torch")
