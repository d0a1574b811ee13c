"""How many connections the process may hold: each is an open file."""

from __future__ import annotations

import logging
import resource

_OTHER_FILES = 128  # what the process opens beside connections, with room to refuse some

log = logging.getLogger("engine.server")


def fit_connections(wanted: int) -> int:
    """Raise the limit of open files as far as it goes; how many connections then fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, wanted + _OTHER_FILES)
    if soft != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    fitting = max(1, hard - _OTHER_FILES)
    if wanted <= fitting:
        return wanted
    log.warning(
        "max_connections is %d, but this process may open %d files: taking %d. "
        "Raise `ulimit -n` or lower max_connections",
        wanted, hard, fitting,
    )  # fmt: skip
    return fitting
