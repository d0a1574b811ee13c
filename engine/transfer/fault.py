"""CopyFault: how a test makes a copy engine slow or wrong."""

from __future__ import annotations

from typing import NamedTuple


class CopyFault(NamedTuple):
    """What goes wrong with a job: the worker sleeps before it and before each unit (a layer of an
    onload, a page of an offload), and fails instead of copying unit `fail_unit`. Without a fault an
    offload moves a few pages at a time."""

    job_delay_us: int = 0
    unit_delay_us: int = 0
    fail_unit: int | None = None
