"""Settings that hold for all tests."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

# No deadline: a shared machine stalls now and then, and no test makes a claim about time.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)

# One thread an operation: the machine's cores are shared. Tests of threads set their own number.
torch.set_num_threads(1)
settings.load_profile("ci" if os.environ.get("CI") else "default")
