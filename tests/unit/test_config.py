"""Rules between parts of the configuration."""

import pytest

from engine.config import EngineConfig, HealthConfig, TransferConfig
from engine.errors import ConfigError


def config_of(copy_timeout_s, watchdog_s):
    return EngineConfig(
        transfer=TransferConfig(copy_timeout_s=copy_timeout_s),
        health=HealthConfig(watchdog_s=watchdog_s),
    )


def test_step_that_waits_for_a_copy_is_not_taken_for_hung():
    with pytest.raises(ConfigError, match=r"copy_timeout_s is 20\.0: .* watchdog_s=20"):
        config_of(20.0, 20.0)
    config_of(20.0, 21.0)
    config_of(20.0, 0.0)
