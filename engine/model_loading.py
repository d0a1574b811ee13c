"""Loading models beside the one that is served: in a thread of its own, one at a time.

The thread uses one core and touches nothing of the running engine; the core asks for the result
in its passes.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.core_parts import ModelLoader, ServedModel, Waker
from engine.errors import ConfigError, EngineError
from engine.models.base import Model
from engine.models.loader import load_catalogue, load_model_dir

_SWITCH_INTERVAL_S = 0.00005
"""While a model is loaded: a thread that serves and wants the interpreter (the device thread does,
after every torch operation) waits that long for the loader at most. Python's own is 5 ms."""

_logger = logging.getLogger(__name__)


class BackgroundLoader(ModelLoader):
    """Owned by the core thread; its own thread only ever sets a `_Load`'s result.

    Args:
        root: Folder below which directories may be loaded; None allows none.
        serve: Makes what runs a loaded model, and warms it up.
        wake: Set when a load has ended.
    """

    def __init__(
        self, root: Path | None, serve: Callable[[Model], ServedModel], wake: Waker
    ) -> None:
        self._root = root
        self._serve = serve
        self._wake = wake
        self._load: _Load | None = None

    def load(
        self, path: str, version: str | None, beside: Model
    ) -> Callable[[], ServedModel | None]:
        directory = self._allowed(path)

        def make() -> ServedModel:
            start_s = time.monotonic()
            model = load_model_dir(directory, weights_version=version)
            check_beside(model, beside)
            load_s = time.monotonic() - start_s
            served = self._serve(model)
            served.load_s = load_s
            return served

        return self._start(make, f"load {directory}")

    def grow(self, path: str, model: Model) -> Callable[[], ServedModel | None]:
        directory = self._allowed(path)
        return self._start(
            lambda: self._serve(model.with_catalogue(load_catalogue(directory))),
            f"load the catalogue of {directory}",
        )

    def close(self) -> None:
        if self._load is not None:
            self._load.join()

    def _allowed(self, path: str) -> Path:
        """The directory, links resolved. Raises ConfigError outside the root."""
        if self._root is None:
            raise ConfigError(
                f"{path} cannot be loaded: this engine serves no model directory, so start it "
                "with weights_root, the folder that versions are loaded from"
            )
        root = self._root.resolve()
        try:
            directory = (root / path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
            raise ConfigError(f"{path[:200]!r} is no path: {error}") from None
        if not directory.is_relative_to(root):
            raise ConfigError(f"{path} is outside of weights_root={root}: put it below that folder")
        if not os.path.isdir(directory):  # never raises, unlike Path.is_dir
            raise ConfigError(f"{directory} is no directory")
        return directory

    def _start(
        self, make: Callable[[], ServedModel], purpose: str
    ) -> Callable[[], ServedModel | None]:
        if self._load is not None and self._load.is_running:
            raise ConfigError(f"cannot {purpose} now: another load is under way, wait for its end")
        self._load = _Load(make, purpose, self._wake)
        return self._load.result


class _Load:
    """One load: a thread, then a model or an error, which is handed over and not kept."""

    def __init__(self, make: Callable[[], ServedModel], purpose: str, wake: Waker) -> None:
        self._make: Callable[[], ServedModel] | None = make
        self._purpose = purpose
        self._wake = wake
        self._outcome: ServedModel | EngineError | None = None
        self._is_running = True
        self._thread = threading.Thread(target=self._run, name="model-loader", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """There is neither a model nor an error yet. (The thread may outlive that a moment.)"""
        return self._is_running

    def join(self) -> None:
        self._thread.join()

    def result(self) -> ServedModel | None:
        """The model, once, or None while it is being made; raises what went wrong."""
        if self._is_running:
            return None
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, EngineError):
            raise outcome
        return outcome

    def _run(self) -> None:
        assert self._make is not None
        torch.set_num_threads(1)
        _lower_own_priority()
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            self._outcome = self._make()
        except EngineError as error:
            self._outcome = error
        except BaseException as error:  # also what a plug-in raises to exit: every load ends
            _logger.exception("could not %s", self._purpose)
            reason = f"{type(error).__name__}: {error}"
            self._outcome = ConfigError(f"could not {self._purpose}: {reason}")
        finally:
            sys.setswitchinterval(usual_s)
        self._make = None  # it holds models, and this thread may outlive the load
        self._is_running = False
        self._wake.set()


def _lower_own_priority() -> None:
    """Let the threads that serve go first (Linux: niceness is per thread)."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    except OSError:
        _logger.debug("the loader thread keeps its priority", exc_info=True)


def check_beside(model: Model, running: Model) -> None:
    """Raise ConfigError unless both fit one pool of pages and take the same requests."""
    new, old = model.spec, running.spec
    problems = [
        f"{name} is {getattr(new, name)}, the running version has {getattr(old, name)}"
        for name in ("name", "dtype", "num_layers", "num_kv_heads", "qk_dim", "v_dim", "tasks")
        if getattr(new, name) != getattr(old, name)
    ]
    new_face, old_face = model.describe(), running.describe()
    problems += [
        f"{name} is {getattr(new_face, name)}, the running version has {getattr(old_face, name)}"
        for name in ("features", "context_features", "score_names", "reads_query_time")
        if getattr(new_face, name) != getattr(old_face, name)
    ]
    if problems:
        raise ConfigError(
            f"weights version {new.weights_version!r} cannot be served beside "
            f"{old.weights_version!r}: {'; '.join(problems)}. Serve it with a server of its own"
        )
