"""Flags, files and how they override each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from engine.config import (
    AttentionConfig,
    CacheConfig,
    EngineConfig,
    HealthConfig,
    SchedulerConfig,
    TransferConfig,
    WeightsConfig,
)
from engine.entrypoints import cli
from engine.entrypoints.cli import (
    Arguments,
    CacheFlags,
    ComputeFlags,
    ConformanceOptions,
    ServeFlags,
    flat_options,
    main,
    serve_config,
)
from engine.entrypoints.config import (
    ConnectionConfig,
    SecurityConfig,
    ServeConfig,
    ServerConfig,
)
from engine.errors import ConfigError


def serve(*flags: str, file: Path | None = None) -> ServeConfig:
    return serve_config(Arguments(list(flags), file))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_without_flags_all_is_default() -> None:
    assert serve() == ServeConfig()


def test_flags_set_what_they_name() -> None:
    line = (
        "--model m --port 0 --cache device --device-pages 9 --page-size 4 --chunk-size 8 "
        "--host-bytes 77 --max-queue-requests 200 --no-look-ahead --workers python "
        "--backend reference --threads 1 --check-invariants --access-log-format off"
    )
    config = serve(*line.split())
    assert config == ServeConfig(
        model="m",
        server=ServerConfig(port=0, access_log_format="off"),
        engine=EngineConfig(
            cache=CacheConfig(
                tiers="device", device_pages=9, page_size=4, chunk_size=8, host_bytes=77
            ),
            scheduler=SchedulerConfig(max_queue_requests=200, look_ahead=False),
            transfer=TransferConfig(workers="python"),
            attention=AttentionConfig(backend="reference"),
            threads=1,
            check_invariants=True,
        ),
    )


def test_keys_repeat_and_limits_have_flags(tmp_path: Path) -> None:
    config = serve(
        *["--api-key", "a", "--api-key", "b", "--admin-api-key", "c", "--max-connections", "7"]
    )
    assert config.server.security == SecurityConfig(api_key=("a", "b"), admin_api_key=("c",))
    assert config.server.connections.max_connections == 7
    file = write(tmp_path / "c.yaml", "server: {security: {api_key: [a]}}")
    assert serve("--api-key", "b", file=file).server.security.api_key == ("a", "b")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--max-connections 0", "max_connections is 0"),
        ("--header-timeout-s 0", "header_timeout_s is 0"),
        ("--send-timeout-s inf", "send_timeout_s is inf"),
        ("--routing-header X-User", "routing_header is 'X-User'"),
        ("--max-bodies-bytes 1", "max_bodies_bytes is 1"),
        ("--tls-cert c", "tls_cert and tls_key go together"),
    ],
)
def test_limits_that_cannot_work_are_named(flags: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        serve(*flags.split())


def test_the_command_line_overrides_the_file_which_overrides_defaults(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.yaml",
        """
        model: from-file
        server: {port: 1234, drain_timeout_s: 5}
        engine:
          cache: {tiers: "off", page_size: 8, chunk_size: 64}
          attention: {backend: torch, options: {tile: 64}}
        """,
    )
    config = serve("--port", "99", "--cache", "tiered", file=file)
    assert config.model == "from-file"
    assert (config.server.port, config.server.drain_timeout_s) == (99, 5.0)
    assert (config.engine.cache.tiers, config.engine.cache.page_size) == ("tiered", 8)
    assert config.engine.attention.options == {"tile": 64}
    assert config.engine.cache.device_pages == 2048


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("modle: x", "modle"),
        ("engine: {cache: {pages: 3}}", "pages"),
        ("server: {port: many}", "port"),
        ("modle: x", "the keys are model, server, engine"),
        ("engine: {cache: {pages: 3}}", "engine.cache: .*the keys are tiers, device_pages"),
        ("engine: {cache: {tiers: both}}", "engine.cache.tiers: .*one of off, device, tiered"),
        ("server: {log_user_ids: off}", "server.log_user_ids: Expected `bool`"),
        ("server: {port: 70000}", "70000"),
        ("- a", "list"),
        ("a: [", "YAML"),
        ("[" * 100_000, "YAML"),
        ("engine: {scheduler: {priority_ageing_s: .inf}}", "priority_ageing_s is inf"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        serve(file=write(tmp_path / "c.yaml", text))


def test_a_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="no UTF-8 text"):
        serve(file=tmp_path / "c.yaml")


def test_off_in_a_file_is_a_text(tmp_path: Path) -> None:
    """YAML 1.1 reads `off` as false, which would be no cache mode."""
    file = write(
        tmp_path / "c.yaml", "engine: {cache: {tiers: off}, scheduler: {look_ahead: false}}"
    )
    config = serve(file=file)
    assert config.engine.cache.tiers == "off"
    assert config.engine.scheduler.look_ahead is False


def test_a_reader_that_leaves_ends_a_command_without_a_traceback() -> None:
    code = (
        "import sys\n"
        "from engine.entrypoints import cli\n"
        "def report(arguments):\n"
        "    print('a line')\n"
        "    return 0\n"
        "cli.COMMANDS['report'] = cli.Command('Print.', report)\n"
        "sys.stdin.readline()\n"
        "sys.exit(cli.main(['report']))\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, errors = process.communicate("go\n", timeout=60)
    assert (process.returncode, errors) == (cli.EXIT_BROKEN_PIPE, "")


def test_options_of_a_flat_command_come_from_its_file_too(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "golden: here\npage-size: 4\nbackend: [a, b]\n")
    assert flat_options(ConformanceOptions, Arguments([], file), "conformance") == (
        ConformanceOptions(golden="here", page_size=4, backend=("a", "b"))
    )
    arguments = Arguments(["--page-size", "8"], file)
    assert flat_options(ConformanceOptions, arguments, "conformance").page_size == 8
    wrong = write(tmp_path / "w.yaml", "golden: here\nbakend: a\n")
    with pytest.raises(ConfigError, match="bakend"):
        flat_options(ConformanceOptions, Arguments([], wrong), "conformance")


def test_backends_repeat() -> None:
    arguments = Arguments(["--golden", "g", "--backend", "x", "--backend", "y"], None)
    assert flat_options(ConformanceOptions, arguments, "conformance").backend == ("x", "y")


def test_every_setting_has_one_flag() -> None:
    """All fields of the tree are flags, no two of the same name."""
    assert set(CacheFlags.__struct_fields__) - {"cache"} == (
        set(CacheConfig.__struct_fields__) - {"tiers"}
    )
    sections = (
        ServerConfig, ConnectionConfig, SecurityConfig, CacheFlags, SchedulerConfig,
        TransferConfig, WeightsConfig, HealthConfig, ComputeFlags,
    )  # fmt: skip
    names = [name for section in sections for name in section.__struct_fields__]
    assert len(names) == len(set(names))
    assert set(ServeFlags.__struct_fields__) == {
        "model", "server", "cache", "scheduler", "transfer", "weights", "health", "compute",
    }  # fmt: skip
    assert set(EngineConfig.__struct_fields__) == {
        "cache", "scheduler", "transfer", "attention", "weights", "health", "warm_up", "threads",
        "check_invariants",
    }  # fmt: skip
    flags = ServeFlags.from_config(ServeConfig(model="m"))
    assert msgspec.structs.replace(flags, model=None).to_config({}) == ServeConfig()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "--port", "70000"], "mtserve serve: port is 70000: give 0 to 65535"),
        (["serve", "--config"], "mtserve serve: --config needs a file"),
        (["serve", "--config", "/no/such"], "No such file"),
        (["fly"], "unknown command 'fly'"),
        ([], "usage: mtserve"),
    ],
)
def test_a_wrong_command_line_ends_with_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert line in captured.err
    assert "Traceback" not in captured.err


def test_help_names_the_commands_and_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "from engine.entrypoints.cli import main\n"
        "assert main(['--help']) == 0\n"
        "import engine, engine.async_engine, engine.entrypoints.api_server\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for command in cli.COMMANDS:
        assert command in done.stdout
