"""Loading beside the running engine: what may be loaded, and how a load ends."""

import threading

import pytest
from core_harness import tiny_model

from engine.errors import ConfigError
from engine.model_loading import BackgroundLoader


def loader_below(root, serve=lambda model: model):
    return BackgroundLoader(root, serve, threading.Event())


@pytest.mark.parametrize(
    "path", ["a\0b", "x" * 5000, "x/" * 3000, "loop", "loop/x", "\ud800", "..", "/", "missing"]
)
def test_path_that_leads_to_no_allowed_directory_is_refused(tmp_path, path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    loader = loader_below(tmp_path)
    for start in (
        lambda: loader.load(path, None, tiny_model("append")),
        lambda: loader.grow(path, tiny_model("append")),
    ):
        with pytest.raises(ConfigError):
            start()
