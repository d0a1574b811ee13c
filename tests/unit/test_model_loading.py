"""Loading beside the running engine: what may be loaded, and how a load ends."""

import gc
import threading
import weakref

import msgspec
import pytest
from core_harness import tiny_model
from engine_models import CONFIGS

from engine.commands import ActivateWeights, LoadWeights, RetireWeights
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.model_loading import BackgroundLoader
from engine.models.loader import save_model_dir
from engine.testing.models import random_tensors


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


def test_weights_of_a_retired_version_are_let_go(tmp_path):
    for version in ("a", "b", "c"):
        config = msgspec.structs.replace(CONFIGS["append"], weights_version=version)
        save_model_dir(tmp_path / version, config, random_tensors(config))
    cache = CacheConfig(device_pages=64, page_size=4, chunk_size=8, host_bytes=1 << 16)
    models = {}
    with Engine.from_model_dir(tmp_path / "a", EngineConfig(cache=cache)) as engine:
        gc.freeze()  # as a core process does: the collector never frees what was made before
        try:
            for old, new in (("a", "b"), ("b", "c")):
                models[old] = weakref.ref(engine.core._versions.active.served.model)
                engine.rank(user_id="u", history=[1, 11], candidates=[21])
                engine.command(LoadWeights(path=new))
                engine.command(ActivateWeights(version=new))
                engine.command(RetireWeights(version=old))
            engine.rank(user_id="u", history=[1, 11], candidates=[21])
            gc.collect()
            assert {name: model() for name, model in models.items()} == {"a": None, "b": None}
        finally:
            gc.unfreeze()


def exits():
    raise SystemExit("enough")


def test_load_ends_whatever_is_raised_in_it(tmp_path):
    save_model_dir(tmp_path, CONFIGS["append"], random_tensors(CONFIGS["append"]))
    loader = loader_below(tmp_path, serve=lambda model: exits())
    for _ in range(2):
        loading = loader.load(".", "2", tiny_model("append"))
        loader.close()
        with pytest.raises(ConfigError, match="SystemExit: enough"):
            loading()
