"""The command line: `mtserve serve | evaluate | replay | conformance | collect-env`.

Every command's options are a struct; its fields are the flags and its docstring is the help. A
YAML file (`--config`) may hold them too: defaults < file < command line, unknown keys are errors.
A wrong option or model ends with one line and status 2. torch is loaded only by commands that
compute in this process.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import tyro
import yaml

from engine.config import (
    AttentionConfig,
    CacheConfig,
    EngineConfig,
    HealthConfig,
    SchedulerConfig,
    TransferConfig,
    WeightsConfig,
)
from engine.core_launch import SLEEP_WHEN_IDLE
from engine.entrypoints.config import ServeConfig, ServerConfig
from engine.errors import ConfigError, EngineError
from engine.version import __version__

EXIT_USAGE = 2
EXIT_BROKEN_PIPE = 141
EXIT_INTERRUPTED = 130
T = TypeVar("T", bound=msgspec.Struct)


class CacheFlags(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How user state is kept.

    Attributes:
        cache: "off" recomputes every history, "device" keeps pages, "tiered" adds host chunks.
        device_pages: Usable pages of the device pool.
        page_size: Token slots of a page.
        chunk_size: Tokens of a host chunk, a multiple of page_size.
        host_bytes: Bytes of the host arena; whole chunks are used.
        eviction_policy: Name of an `engine.eviction_policies` entry point.
        poison: Fill free pages with NaN, so that a read of a stale row shows (debug, slow).
        allow_small_pool: Start although the device pool cannot hold the longest history that the
            model takes; such histories are then computed outside the cache, each time anew.
    """

    cache: Literal["off", "device", "tiered"]
    device_pages: int
    page_size: int
    chunk_size: int
    host_bytes: int
    eviction_policy: str
    poison: bool
    allow_small_pool: bool

    @classmethod
    def from_config(cls, config: CacheConfig) -> CacheFlags:
        """The flags that mean this configuration."""
        fields = msgspec.structs.asdict(config)
        return cls(cache=fields.pop("tiers"), **fields)

    def to_config(self) -> CacheConfig:
        """The configuration these flags mean. Raises ConfigError."""
        fields = msgspec.structs.asdict(self)
        return CacheConfig(tiers=fields.pop("cache"), **fields)


class ComputeFlags(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How steps are computed.

    Attributes:
        backend: Attention backend, or "auto". (Its options stand in the file:
            engine.attention.options.)
        threads: Threads of one step; 0 leaves torch's choice.
        warm_up: Run steps of the shapes that will be met before serving.
        check_invariants: Check the bookkeeping whenever the engine is idle (debug).
    """

    backend: str
    threads: int
    warm_up: bool
    check_invariants: bool


class ServeFlags(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve a model over HTTP: Open Inference Protocol v2, native JSON, /metrics.

    Attributes:
        model: Model directory. Without it, a small built-in model with random weights is served:
            good to try the wire, its scores mean nothing.
        server: Where it listens and what it accepts.
        cache: How user state is kept.
        scheduler: What a step may hold and how much may wait.
        transfer: How copies between the tiers run.
        weights: How weights versions live beside each other.
        health: When the core counts as hung.
        compute: How steps are computed.
    """

    model: str | None
    server: tyro.conf.OmitArgPrefixes[tyro.conf.UseAppendAction[ServerConfig]]
    cache: tyro.conf.OmitArgPrefixes[CacheFlags]
    scheduler: tyro.conf.OmitArgPrefixes[SchedulerConfig]
    transfer: tyro.conf.OmitArgPrefixes[TransferConfig]
    weights: tyro.conf.OmitArgPrefixes[WeightsConfig]
    health: tyro.conf.OmitArgPrefixes[HealthConfig]
    compute: tyro.conf.OmitArgPrefixes[ComputeFlags]

    @classmethod
    def from_config(cls, config: ServeConfig) -> ServeFlags:
        """The flags that mean this configuration (attention options have none)."""
        engine = config.engine
        return cls(
            model=config.model,
            server=config.server,
            cache=CacheFlags.from_config(engine.cache),
            scheduler=engine.scheduler,
            transfer=engine.transfer,
            weights=engine.weights,
            health=engine.health,
            compute=ComputeFlags(
                backend=engine.attention.backend,
                threads=engine.threads,
                warm_up=engine.warm_up,
                check_invariants=engine.check_invariants,
            ),
        )

    def to_config(self, attention_options: dict[str, Any]) -> ServeConfig:
        """The configuration these flags mean. Raises ConfigError."""
        return ServeConfig(
            model=self.model,
            server=self.server,
            engine=EngineConfig(
                cache=self.cache.to_config(),
                scheduler=self.scheduler,
                transfer=self.transfer,
                weights=self.weights,
                health=self.health,
                attention=AttentionConfig(backend=self.compute.backend, options=attention_options),
                threads=self.compute.threads,
                warm_up=self.compute.warm_up,
                check_invariants=self.compute.check_invariants,
            ),
        )


class ConformanceOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold golden files against the engine's own runner, pages and backends.

    A line per file and backend with the largest error; status 1 if any fails.

    Attributes:
        golden: Folder of golden files.
        backend: Attention backend to check; may be given several times. All built-in ones that
            this machine can run when not given.
        page_size: Token slots of a page.
        piece_size: Where the model allows, histories also run in pieces of this many rows.
    """

    golden: str
    backend: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    page_size: int = 16
    piece_size: int = 7


class Arguments(NamedTuple):
    """A command's arguments, `--config` taken out."""

    rest: list[str]
    file: Path | None


class Command(NamedTuple):
    """A command: its one-line help, what runs it, and whether it computes in this process."""

    help: str
    run: Callable[[Arguments], int]
    computes: bool = True


_CONFIG_HELP = (
    "\n\nA YAML file given with --config FILE may hold the same settings "
    "(defaults < file < command line)."
)


class _YamlLoader(yaml.SafeLoader):
    """YAML in which only true and false are truth values: `tiers: off` means the text "off"."""


_YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF")
)


def _split_config(arguments: Sequence[str]) -> Arguments:
    rest: list[str] = []
    file: Path | None = None
    pending = iter(arguments)
    for argument in pending:
        name, has_value, value = argument.partition("=")
        if name != "--config":
            rest.append(argument)
            continue
        path = value if has_value else next(pending, "")
        if not path:
            raise ConfigError("--config needs a file")
        file = Path(path)
    return Arguments(rest, file)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _YamlLoader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text: {error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}: give keys and values")
    return content


def serve_config(arguments: Arguments) -> ServeConfig:
    """Defaults, then the file, then the flags. Raises ConfigError, or SystemExit after --help."""
    from_file = ServeConfig()
    if arguments.file is not None:
        try:
            from_file = msgspec.convert(_read_yaml(arguments.file), ServeConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{arguments.file}: {_in_words(error)}") from None
    flags = _parse(ServeFlags, arguments.rest, "serve", ServeFlags.from_config(from_file))
    return flags.to_config(from_file.engine.attention.options)


def _in_words(error: msgspec.ValidationError) -> str:
    """What is wrong with a file of settings, and what may stand there instead."""
    what, _, where = str(error).partition(" - at `$")
    path = [name for name in where.strip("`").split(".") if name]
    expected: Any = ServeConfig
    for name in path:
        expected = typing.get_type_hints(expected).get(name) if _is_struct(expected) else None
    stands = f"{'.'.join(path)}: {what}" if path else what
    if _is_struct(expected):
        return f"{stands}; the keys are {', '.join(expected.__struct_fields__)}"
    if typing.get_origin(expected) is Literal:
        return f"{stands}; give one of {', '.join(typing.get_args(expected))}"
    return stands


def _is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def flat_options(options_type: type[T], arguments: Arguments, command: str) -> T:
    """Options of a command whose file has the flags' own names as keys."""
    before = []
    if arguments.file is not None:
        names = options_type.__struct_fields__
        for key, value in _read_yaml(arguments.file).items():
            if str(key).replace("-", "_") not in names:
                raise ConfigError(
                    f"{arguments.file}: unknown key {key!r}, the keys are {', '.join(names)}"
                )
            before += _as_flags(str(key).replace("_", "-"), value)
    return _parse(options_type, [*before, *arguments.rest], command)


def _as_flags(name: str, value: object) -> list[str]:
    match value:
        case None:
            return []
        case bool():
            return [f"--{name}" if value else f"--no-{name}"]
        case list():
            return [part for entry in value for part in (f"--{name}", str(entry))]
        case dict():
            raise ConfigError(f"{name} is a mapping: give one value")
        case _:
            return [f"--{name}", str(value)]


def _parse(
    options_type: type[T], arguments: Sequence[str], command: str, default: T | None = None
) -> T:
    docstring = (options_type.__doc__ or "").partition("\n    Attributes:")[0]
    description = "\n".join(line.strip() for line in docstring.strip().splitlines()) + _CONFIG_HELP
    prog = f"mtserve {command}"
    if default is None:
        return tyro.cli(options_type, prog=prog, description=description, args=arguments)
    return tyro.cli(
        options_type, prog=prog, description=description, args=arguments, default=default
    )


def _serve(arguments: Arguments) -> int:
    config = serve_config(arguments)
    try:
        from engine.entrypoints import api_server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed: pip install 'mtserve[server]'"
        ) from error
    return api_server.serve(config)


def _evaluate(arguments: Arguments) -> int:
    from engine.entrypoints import evaluate

    options = flat_options(evaluate.EvaluateOptions, arguments, "evaluate")
    _print_report(evaluate.run(options, _progress()))
    return 0


def _replay(arguments: Arguments) -> int:
    if _names_server(arguments):
        return _replay_server(arguments)
    from engine.entrypoints import replay

    options = flat_options(replay.ReplayOptions, arguments, "replay")
    _print_report(replay.run(options, _progress()))
    return 0


def _names_server(arguments: Arguments) -> bool:
    """Whether a replay goes to a running server."""
    is_flag = any(part.partition("=")[0] == "--server" for part in arguments.rest)
    return is_flag or (arguments.file is not None and "server" in _read_yaml(arguments.file))


def _replay_server(arguments: Arguments) -> int:
    try:
        from engine.entrypoints import replay_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'mtserve[bench]'") from error
    options = flat_options(replay_server.ServerReplayOptions, arguments, "replay --server URL")
    report = replay_server.run(options, _progress())
    _print_report(report)
    return EXIT_INTERRUPTED if report.ended == "interrupted" else 0


def _conformance(arguments: Arguments) -> int:
    options = flat_options(ConformanceOptions, arguments, "conformance")
    from engine.entrypoints.conformance import conformance_command

    return conformance_command(
        Path(options.golden),
        backend=options.backend,
        page_size=options.page_size,
        piece_size=options.piece_size,
    )


def _collect_env(arguments: Arguments) -> int:
    from engine.entrypoints import collect_env

    options = flat_options(collect_env.CollectEnvOptions, arguments, "collect-env")
    report = collect_env.collect()
    if options.json:
        _print_report(report)
    else:
        print(report.text())
    return 0


def _print_report(report: msgspec.Struct) -> None:
    print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())


def _progress() -> Callable[[int, int], None] | None:
    """A count on standard error, for people only."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\n" if done == total else ""
        print(f"\r{done}/{total} requests ({done / max(1, total):.0%})", end=end, file=sys.stderr)

    return show


COMMANDS: dict[str, Command] = {
    "serve": Command("Serve a model over HTTP.", _serve, computes=False),
    "evaluate": Command("Ranking quality of a model on a log, through the engine.", _evaluate),
    "replay": Command("Replay a log as requests and account for every token.", _replay),
    "conformance": Command("Hold golden files against this installation.", _conformance),
    "collect-env": Command(
        "What a bug report needs to say about this machine.", _collect_env, computes=False
    ),
}


def _usage() -> str:
    lines = [
        f"mtserve {__version__}: inference for generative recommenders with tiered user state",
        "",
        "usage: mtserve COMMAND [OPTIONS]",
        "",
        *(f"  {name:<12} {command.help}" for name, command in COMMANDS.items()),
        "",
        "`mtserve COMMAND --help` lists a command's options.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments and arguments[0] == "--version":
        print(__version__)
        return 0
    command = COMMANDS.get(arguments[0]) if arguments else None
    if command is None:
        unknown = f"mtserve: unknown command {arguments[0]!r}\n\n" if arguments else ""
        print(unknown + _usage(), file=sys.stderr)
        return EXIT_USAGE
    if arguments[0] != "serve":
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if command.computes:
        os.environ.setdefault("OMP_WAIT_POLICY", SLEEP_WHEN_IDLE)  # before torch is loaded
    try:
        status = command.run(_split_config(arguments[1:]))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `mtserve ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except EngineError as error:
        print(f"mtserve {arguments[0]}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
