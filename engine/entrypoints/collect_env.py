"""`mtserve collect-env`: what a bug report needs to say about an installation and its machine.

A report is sections of facts; a fact is a value or the reason why it could not be read. No probe
ends the command. Of the environment only variables that steer threads, kernels, memory and this
package are listed, and of those the ones that look like secrets only as set.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

import engine
from engine.entrypoints import machine
from engine.version import __version__

Value: TypeAlias = str | int | float | bool | list[str] | None

_GIT_TIMEOUT_S = 5
_LINE = 100

_PACKAGES = ("torch", "numpy", "msgspec", "safetensors", "xxhash", "tyro", "PyYAML")
_OPTIONAL_PACKAGES = (
    "uvicorn",
    "uvloop",
    "httptools",
    "prometheus-client",
    "httpx",
    "grpcio",
    "opentelemetry-sdk",
    "tritonclient",
    "fastapi",
    "ray",
)
_VARIABLES = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|DNNL|ONEDNN|ATEN|TORCH|PYTORCH|MALLOC|ENGINE|MTSERVE)_\w+"
    r"|CUDA_VISIBLE_DEVICES|LD_PRELOAD|PYTHONMALLOC"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


class CollectEnvOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Print what a bug report needs to say about this installation and machine.

    A fact that cannot be read says why not. No key, password or full environment is printed.

    Attributes:
        json: Print JSON instead of text.
    """

    json: bool = False


class Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the report: its value, or in `error` why it could not be read."""

    name: str
    value: Value = None
    error: str | None = None


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one subject."""

    title: str
    facts: list[Fact]


class EnvironmentReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    sections: list[Section]

    def text(self) -> str:
        """The report for people."""
        lines: list[str] = []
        for section in self.sections:
            width = max((len(fact.name) for fact in section.facts), default=0)
            lines += ["", section.title]
            for fact in section.facts:
                first, *others = _in_words(fact)
                lines.append(f"  {fact.name:<{width}}  {first}")
                lines += [f"  {'':<{width}}  {other}" for other in others]
        return "\n".join(lines[1:])


class Probe(NamedTuple):
    """A name and what reads its value; it may raise anything."""

    name: str
    read: Callable[[], Value]


def collect() -> EnvironmentReport:
    """Run all probes; never raises for what one of them finds or misses."""
    return EnvironmentReport(
        sections=[
            section_of("mtserve", _package_probes),
            section_of("system", _system_probes),
            section_of("processor", _processor_probes),
            section_of("memory", _memory_probes),
            section_of("limits", _limit_probes),
            section_of("torch", _torch_probes),
            section_of("engine", _engine_probes),
            section_of("packages", _distribution_probes),
            section_of("environment", partial(variable_probes, os.environ)),
        ]
    )


def section_of(title: str, probes: Callable[[], Iterable[Probe]]) -> Section:
    """The facts of the probes; what keeps them from being listed is a fact as well."""
    facts: list[Fact] = []
    try:
        facts.extend(fact_of(probe) for probe in probes())  # what precedes a failure is kept
    except Exception as error:  # torch cannot be imported, say
        facts.append(_unreadable(title, error))
    return Section(title=title, facts=facts)


def fact_of(probe: Probe) -> Fact:
    """The value, or the reason why not."""
    try:
        return Fact(name=probe.name, value=probe.read())
    except Exception as error:  # whatever is broken here is what the report is for
        return _unreadable(probe.name, error)


def _unreadable(name: str, error: Exception) -> Fact:
    return Fact(name=name, error=f"{type(error).__name__}: {error}")


def _in_words(fact: Fact) -> list[str]:
    """The lines that stand beside the fact's name: one, or one for each of many long values."""
    match fact.value:
        case _ if fact.error is not None:
            return [f"cannot be read: {' '.join(fact.error.split())}"]
        case None:
            return ["none"]
        case bool():
            return ["yes" if fact.value else "no"]
        case int() if fact.name.endswith("bytes"):
            return [f"{fact.value} ({fact.value / 2**20:.0f} MiB)"]
        case list():
            joined = ", ".join(fact.value)
            return fact.value if len(joined) > _LINE else [joined or "none"]
        case _:
            return [str(fact.value)]


def _package_probes() -> Iterator[Probe]:
    yield Probe("version", lambda: __version__)
    yield Probe("commit", lambda: _commit(Path(engine.__file__).resolve().parent.parent))
    yield Probe("folders", lambda: list(engine.__path__))


def _commit(checkout: Path) -> str:
    """The commit of a git checkout, and whether files differ from it."""
    if not (checkout / ".git").exists():
        return "installed, not a git checkout"

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=_GIT_TIMEOUT_S,
        )
        if done.returncode != 0:
            raise OSError(f"git {arguments[0]}: {done.stderr.strip()}")
        return done.stdout.strip()

    changed = " with uncommitted changes" if git("status", "--porcelain") else ""
    return git("rev-parse", "HEAD") + changed


def _system_probes() -> Iterator[Probe]:
    yield Probe("python", lambda: f"{platform.python_implementation()} {sys.version}")
    yield Probe("executable", lambda: sys.executable)
    yield Probe("virtual environment", lambda: sys.prefix != sys.base_prefix)
    yield Probe("system", machine.os_name)
    yield Probe("kernel", lambda: f"{platform.system()} {platform.release()} {platform.version()}")
    yield Probe("libc", lambda: " ".join(platform.libc_ver()))


def _processor_probes() -> Iterator[Probe]:
    yield Probe("model", machine.cpu_model)
    yield Probe("architecture", platform.machine)
    yield Probe("flags", machine.cpu_flags)
    yield Probe("cores online", os.cpu_count)
    yield Probe("cores of this process", lambda: len(os.sched_getaffinity(0)))
    yield Probe("cores of the control group", lambda: _or_no_limit(machine.group_cores()))
    yield Probe("load", lambda: ", ".join(f"{load:.2f}" for load in os.getloadavg()))


def _or_no_limit(limit: float | None) -> Value:
    return "no limit" if limit is None else limit


def _memory_probes() -> Iterator[Probe]:
    yield Probe("total bytes", lambda: machine.memory_bytes("MemTotal"))
    yield Probe("available bytes", lambda: machine.memory_bytes("MemAvailable"))
    yield Probe("swap bytes", lambda: machine.memory_bytes("SwapTotal"))
    yield Probe("control group bytes", lambda: _or_no_limit(machine.group_memory_bytes()))
    yield Probe("transparent huge pages", machine.transparent_huge_pages)
    yield Probe("reserved huge pages", lambda: machine.memory_bytes("HugePages_Total"))
    yield Probe("huge page bytes", lambda: machine.memory_bytes("Hugepagesize"))


def _limit_probes() -> Iterator[Probe]:
    for name, number in (
        ("open files", resource.RLIMIT_NOFILE),
        ("processes", resource.RLIMIT_NPROC),
        ("locked memory", resource.RLIMIT_MEMLOCK),
        ("address space", resource.RLIMIT_AS),
        ("core file", resource.RLIMIT_CORE),
    ):
        yield Probe(name, partial(_limits, number))


def _limits(number: int) -> str:
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
        for limit in resource.getrlimit(number)
    )
    return f"{soft}, at most {hard}"


def _torch_probes() -> Iterator[Probe]:
    from engine.entrypoints import compute_facts

    yield Probe("version", compute_facts.version)
    yield Probe("threads", compute_facts.threads)
    yield Probe("kernels for", compute_facts.kernels_for)
    yield Probe("oneDNN", compute_facts.has_onednn)
    yield Probe("cuda devices", compute_facts.cuda_devices)
    yield Probe("parallel", compute_facts.parallel_info)


def _engine_probes() -> Iterator[Probe]:
    from engine.entrypoints import compute_facts

    yield Probe("native library", compute_facts.native_library)
    yield Probe("native kernels", compute_facts.native_kernels)
    yield Probe("copy workers", compute_facts.copy_workers)
    yield Probe("fingerprints", compute_facts.fingerprints)
    yield Probe("memory left bytes", compute_facts.memory_left)
    for name in compute_facts.backends():
        yield Probe(f"attention {name}", partial(compute_facts.backend_verdicts, name))


def _distribution_probes() -> Iterator[Probe]:
    for name in (*_PACKAGES, *_OPTIONAL_PACKAGES):
        yield Probe(name, partial(_package_version, name))


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def variable_probes(environment: Mapping[str, str]) -> Iterator[Probe]:
    """The variables worth telling; the value of one that may be a secret is not read."""
    for name in sorted(environment):
        if _VARIABLES.fullmatch(name):
            value = "set, not shown" if _SECRET.search(name) else environment[name]
            yield Probe(name, partial(str, value))
