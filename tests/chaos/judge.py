"""Recomputes answers: one engine without a cache for each weights version."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.request_builder import build_request
from engine.types import Task


class Verdict(NamedTuple):
    """How many answers were checked, and the first ones that were wrong."""

    num_checked: int
    wrong: list[str]


class Answered(NamedTuple):
    """A rank answer as the client got it, and the whole history it stands for."""

    request_id: str
    version: str
    history: list[int]
    candidates: list[int]
    scores: list[list[float]]


class Judge:
    """Engines with the cache off, made when their version is first seen."""

    def __init__(self, models: Path) -> None:
        self._models = models
        self._engines: dict[str, Engine] = {}

    def judge(self, answers: list[Answered]) -> Verdict:
        """Every answer against a recompute by the version it names, bit for bit."""
        wrong = []
        by_version: dict[str, list[Answered]] = {}
        for answer in answers:
            by_version.setdefault(answer.version, []).append(answer)
        for version, batch in by_version.items():
            requests = [
                build_request(
                    task=Task.RANK,
                    user_id=str(number),
                    history=answer.history,
                    candidates=answer.candidates,
                    request_id=str(number),
                )
                for number, answer in enumerate(batch)
            ]
            for answer, outcome in zip(batch, self._engine(version).run(requests), strict=True):
                response = outcome.response
                expected = None if response is None else response.scores
                got = np.array(answer.scores, np.float32)
                if expected is None or not np.array_equal(got, expected):
                    wrong.append(f"{answer.request_id}: {got} by {version}, not {expected}")
        return Verdict(len(answers), wrong)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def _engine(self, version: str) -> Engine:
        if version not in self._engines:
            config = EngineConfig(
                cache=CacheConfig(tiers="off", device_pages=512, page_size=8, chunk_size=8),
                threads=1,
            )
            self._engines[version] = Engine.from_model_dir(self._models / version, config)
        return self._engines[version]
