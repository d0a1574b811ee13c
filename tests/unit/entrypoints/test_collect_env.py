"""`mtserve collect-env`: every section is there, a broken probe is a fact, no secret is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engine.entrypoints import cli, collect_env
from engine.entrypoints.collect_env import EnvironmentReport, Fact, Probe, Section

SECTIONS = [
    "mtserve", "system", "processor", "memory", "limits", "torch", "engine", "packages",
    "environment",
]  # fmt: skip


def facts_of(report: EnvironmentReport) -> dict[tuple[str, str], Fact]:
    return {
        (section.title, fact.name): fact for section in report.sections for fact in section.facts
    }


def test_the_report_of_this_machine_has_every_section_and_what_is_known_here() -> None:
    report = collect_env.collect()

    assert [section.title for section in report.sections] == SECTIONS
    facts = facts_of(report)
    assert facts["mtserve", "version"].value == "0.1.0"
    assert facts["processor", "cores of this process"].value == len(os.sched_getaffinity(0))
    assert "cpu float32 silu: yes" in facts["engine", "attention torch"].value
    kernels = facts["engine", "native kernels"].value
    assert kernels is None or kernels.partition(", this machine has base")[0] in {
        "base", "avx2", "avx512_bf16",
    }  # fmt: skip
    assert facts["packages", "numpy"].value == sys.modules["numpy"].__version__
    assert facts["limits", "open files"].error is None


def _broken() -> str:
    raise PermissionError("not for you")


def test_a_probe_that_fails_is_a_fact_with_the_reason() -> None:
    fact = collect_env.fact_of(Probe("secret file", _broken))

    assert (fact.value, fact.error) == (None, "PermissionError: not for you")
    text = EnvironmentReport(sections=[Section(title="files", facts=[fact])]).text()
    assert text == "files\n  secret file  cannot be read: PermissionError: not for you"


def test_a_list_of_probes_that_breaks_off_keeps_the_facts_before() -> None:
    def probes() -> Iterator[Probe]:
        yield Probe("first", lambda: 1)
        raise ImportError("no torch here")

    section = collect_env.section_of("torch", probes)

    assert section.facts == [
        Fact(name="first", value=1),
        Fact(name="torch", error="ImportError: no torch here"),
    ]


def test_values_are_told_in_words() -> None:
    facts = [
        Fact(name="is", value=True),
        Fact(name="swap bytes", value=3 << 20),
        Fact(name="few", value=["a", "b"]),
        Fact(name="none", value=[]),
        Fact(name="many", value=["x" * 60, "y" * 60]),
    ]

    lines = EnvironmentReport(sections=[Section(title="t", facts=facts)]).text().splitlines()

    assert lines == [
        "t",
        "  is          yes",
        "  swap bytes  3145728 (3 MiB)",
        "  few         a, b",
        "  none        none",
        "  many        " + "x" * 60,
        "              " + "y" * 60,
    ]


def test_only_variables_that_matter_are_told_and_no_secret() -> None:
    environment = {
        "OMP_NUM_THREADS": "4",
        "ENGINE_API_KEY": "hunter2",
        "ENGINE_SOME_TOKEN": "hunter3",
        "HOME": "/home/someone",
        "AWS_SECRET_ACCESS_KEY": "hunter4",
    }

    probes = {probe.name: probe.read() for probe in collect_env.variable_probes(environment)}

    assert probes == {
        "ENGINE_API_KEY": "set, not shown",
        "ENGINE_SOME_TOKEN": "set, not shown",
        "OMP_NUM_THREADS": "4",
    }


def test_the_command_prints_json_and_no_secret_of_the_environment() -> None:
    secret = "a-secret-that-must-not-show"
    done = subprocess.run(
        [sys.executable, "-m", "engine.entrypoints.cli", "collect-env", "--json"],
        env={**os.environ, "ENGINE_API_KEY": secret, "DATABASE_PASSWORD": secret},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    assert secret not in done.stdout
    titles = [section["title"] for section in json.loads(done.stdout)["sections"]]
    assert titles == SECTIONS


def test_the_command_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["collect-env"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mtserve"
    assert lines[1].split() == ["version", "0.1.0"]
