"""MovieLens-100K, fetched when it is needed.

Its licence forbids redistribution, so nothing of it is part of this repository: the ratings are
read out of the wheel of recbole 1.2.1, which pip downloads into a cache folder once.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

_REQUIREMENT = "recbole==1.2.1"
_WHEEL_PATTERN = "recbole-1.2.1-*.whl"
_MEMBER = "recbole/dataset_example/ml-100k/ml-100k.inter"

DEFAULT_CACHE = Path(__file__).resolve().parents[2] / "build" / "movielens"


class FetchError(RuntimeError):
    """The ratings could not be fetched; the message says why and what to do."""


def fetch(cache: Path = DEFAULT_CACHE) -> Path:
    """The path of `ml-100k.inter` (tab-separated, typed header); downloads it the first time.

    Raises FetchError when there is no network, no pip, or the wheel is not what it should be.
    """
    ratings = cache / "ml-100k.inter"
    if ratings.exists():
        return ratings
    cache.mkdir(parents=True, exist_ok=True)
    wheel = next(cache.glob(_WHEEL_PATTERN), None) or _download(cache)
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(_MEMBER)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel} does not hold {_MEMBER}: remove it and try again") from error
    part = ratings.with_suffix(".part")
    part.write_bytes(content)
    part.replace(ratings)
    return ratings


def _download(cache: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet",
               "--disable-pip-version-check", "--retries", "1", "--timeout", "20",
               "--dest", str(cache), _REQUIREMENT]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(cache.glob(_WHEEL_PATTERN), None)
    if ended.returncode or wheel is None:
        raise FetchError(
            f"cannot download {_REQUIREMENT} with pip: {ended.stderr.strip()[-500:]}\n"
            f"Check the network, or put the wheel into {cache}."
        )
    return wheel
