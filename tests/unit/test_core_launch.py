"""The environment that a core process is started in."""

import socket
import subprocess

import pytest

from engine import core_launch


@pytest.fixture
def environment(monkeypatch):
    """Starts a core that is never really started; the environment it would have got."""
    started = []

    class Process:
        def __init__(self, command, **options):
            started.append(options["env"])

    monkeypatch.setattr(subprocess, "Popen", Process)

    def launch():
        launched = core_launch.launch_core(core_launch.CoreOptions())
        assert isinstance(launched.sock, socket.socket)
        launched.sock.close()
        return started[-1]

    return launch


def test_threads_of_a_core_sleep_while_they_wait(environment, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert environment()["OMP_WAIT_POLICY"] == "PASSIVE"


def test_the_wait_policy_of_the_user_stands(environment, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert environment()["OMP_WAIT_POLICY"] == "ACTIVE"
