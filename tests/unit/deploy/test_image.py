"""The image and the compose file: what they start, as whom, and that they name what is there."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.image.rehearse import Dockerfile
from engine.entrypoints.cli import COMMANDS, Arguments, serve_config
from tests.unit.deploy.served import served

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
IMAGE = Dockerfile.read()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVER = COMPOSE["services"]["mtserve"]


def test_the_entrypoint_is_a_command_with_flags_it_knows() -> None:
    program, command, *flags = IMAGE.entrypoint
    scripts = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[2]
    assert f'\n{program} = "' in scripts
    assert command in COMMANDS
    config = serve_config(Arguments(flags, None))
    assert (config.server.host, config.server.port) == ("0.0.0.0", 8000)


def test_the_health_check_asks_the_live_route_on_the_same_port() -> None:
    code = IMAGE.health[-1]
    assert "8000" in code
    (path,) = re.findall(r"'(/[\w/]+)'", code)
    assert path == "/v2/health/live"
    assert served("GET", path) is not None
    failed = subprocess.run([sys.executable, "-c", code.replace("8000", "1")], capture_output=True)
    assert failed.returncode != 0


def test_it_runs_as_a_user_without_rights_and_drains_on_stop() -> None:
    assert IMAGE.user >= 1000
    assert IMAGE.stop.name == "SIGTERM"
    last_stage = (DEPLOY / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert f"\nUSER {IMAGE.user}:" in last_stage


def test_torch_is_the_version_that_setup_installs() -> None:
    assert f"torch=={IMAGE.torch_version}" in (ROOT / "scripts/setup").read_text()


def test_the_extras_are_those_of_the_package_and_have_the_server() -> None:
    extras = IMAGE.extras.split(",")
    assert "server" in extras
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= project["optional-dependencies"].keys()


def test_what_is_copied_is_there_and_is_not_ignored() -> None:
    """The last pattern that fits a path decides, as for `docker build`."""
    patterns = [
        line
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]

    def is_sent(name: str) -> bool:
        sent = True
        for pattern in patterns:
            if fnmatch.fnmatch(name, pattern.removeprefix("!")):
                sent = pattern.startswith("!")
        return sent

    for name in IMAGE.copied:
        assert (ROOT / name).exists(), name
        assert is_sent(name), name
    for name in (".git", ".venv", "build", "tests", "engine/__pycache__", "engine/_engine_cpu.so"):
        assert not is_sent(name), name


def test_the_steps_of_the_build_can_be_run() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    scripts = set(re.findall(r"/src/(deploy/image/\w+)", text))
    assert scripts == {"deploy/image/torch", "deploy/image/wheel", "deploy/image/install"}
    for script in scripts:
        assert os.access(ROOT / script, os.X_OK), script


def test_compose_starts_the_server_with_flags_it_knows() -> None:
    config = serve_config(Arguments(SERVER["command"], None))
    assert config.model == "/model"
    assert config.engine.threads == SERVER["cpus"]
    assert (DEPLOY / SERVER["build"]["context"] / SERVER["build"]["dockerfile"]).is_file()
    assert SERVER["read_only"] is True
    grace_s = int(SERVER["stop_grace_period"].removesuffix("s"))
    assert grace_s >= config.server.drain_timeout_s + 25


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_compose_listens_on_loopback_and_mounts_what_is_there(name: str) -> None:
    service: dict[str, Any] = COMPOSE["services"][name]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    for mount in service["volumes"]:
        source = mount.partition(":")[0]
        if source.startswith("."):
            assert (DEPLOY / source).exists(), source


def test_prometheus_scrapes_the_compose_service_by_the_job_that_alerts_name() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "mtserve"
    assert served("GET", job["metrics_path"]) is not None
    assert job["static_configs"] == [{"targets": ["mtserve:8000"]}]
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])


def test_grafana_finds_its_dashboard_and_the_dashboard_is_fresh() -> None:
    folder = DEPLOY / "grafana"
    (provider,) = yaml.safe_load(
        (folder / "provisioning/dashboards/mtserve.yaml").read_text()
    )["providers"]  # fmt: skip
    targets = [
        mount.split(":")[1] for mount in COMPOSE["services"]["grafana"]["volumes"] if ":" in mount
    ]
    assert f"{provider['options']['path']}/mtserve.json" in targets
    done = subprocess.run([sys.executable, str(folder / "build.py"), "--check"])
    assert done.returncode == 0
