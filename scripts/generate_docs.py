"""Write the pages of `docs/` that are made from the code; with `--check`, only tell stale ones.

    python scripts/generate_docs.py            # write
    python scripts/generate_docs.py --check    # exit 1 and name the pages that are out of date

A page is a function without arguments that returns its text. What a page says about an option, a
metric, an error or a transition stands in the code, next to what it describes.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine import errors
from engine.block_manager import user_state
from engine.entrypoints import cli, metrics_export, oip_schema
from engine.entrypoints.config import ServeConfig
from engine.entrypoints.docstrings import attribute_docs, summary_of
from engine.entrypoints.protocol import UsageParameters
from engine.scheduler import life
from engine.weights import life as weights_life
from scripts import native_api_page

DOCS = Path(__file__).resolve().parent.parent / "docs"

StructType = type[msgspec.Struct]


class Option(NamedTuple):
    """One setting, as a row of a table."""

    name: str
    kind: str
    default: str
    meaning: str


class Section(NamedTuple):
    """The settings of one struct: its path in the file, what it is about, and its options."""

    path: str
    summary: str
    options: list[Option]


# Reading the structs


def options_of(struct_type: StructType) -> Iterator[Option]:
    """The fields that hold a value, not another struct. Raises ValueError without a meaning."""
    docs = attribute_docs(struct_type)
    for field in msgspec.structs.fields(struct_type):
        if _is_struct(field.type):
            continue
        if field.name not in docs:
            raise ValueError(f"{struct_type.__name__}.{field.name} has no line under Attributes")
        yield Option(field.name, kind_of(field.type), _default_of(field), docs[field.name])


def _is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def kind_of(annotation: Any) -> str:
    """A type in words: "integer", "one of off, device, tiered", "text or null"."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind_of(arguments[0])
    if origin is typing.Literal:
        return "one of " + ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(kind_of(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {kind_of(arguments[0])}"
    if origin is dict:
        return "mapping"
    words = {bool: "true or false", int: "integer", float: "number", str: "text"}
    return "null" if annotation is type(None) else words[annotation]


def _default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return f"`{msgspec.json.encode(field.default).decode()}`"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{msgspec.json.encode(field.default_factory()).decode()}`"
    return "required"


def sections_of(struct_type: StructType, path: str = "") -> Iterator[Section]:
    """A struct's section, then those of the structs in it."""
    yield Section(path, summary_of(struct_type), list(options_of(struct_type)))
    for field in msgspec.structs.fields(struct_type):
        if _is_struct(field.type):
            yield from sections_of(field.type, f"{path}.{field.name}".lstrip("."))


def _flags_of(struct_type: StructType) -> Iterator[str]:
    """Field names of the leaves of a flags struct: each is a flag of that name."""
    for name, annotation in typing.get_type_hints(struct_type).items():
        if _is_struct(annotation):
            yield from _flags_of(annotation)
        else:
            yield name


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A Markdown table, line by line."""

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(titles), "|" + "---|" * len(titles), *map(line, rows)]


# Configuration

_RENAMED_FLAGS = {"engine.cache.tiers": "cache", "engine.attention.backend": "backend"}
_WITHOUT_FLAG = {"engine.attention.options"}

_CONFIGURATION = """\
# Configuration

Defaults, then a file, then the command line: the later one wins. The result is built once, checked
as a whole and never changed; the server writes it to its log at start. An unknown key is an error.
A wrong value is an error that names the value and what to give instead.

`mtserve serve` reads a YAML file given with `--config`. Its keys are the paths below:

```yaml
model: build/movielens/model
server:
  port: 8000
engine:
  cache:
    tiers: tiered
    device_pages: 4096
    page_size: 32
  scheduler:
    max_batch_tokens: 8192
```

Flags have no prefix: `engine.cache.device_pages` is `--device-pages`. `true or false` options have
two flags: `--look-ahead` and `--no-look-ahead`. `mtserve serve --help` lists them all.

In Python the same tree is `engine.EngineConfig`:

```python
from engine import EngineConfig
from engine.config import CacheConfig

config = EngineConfig(cache=CacheConfig(device_pages=4096, host_bytes=8 << 30))
```

## How large is it?

A token takes `num_layers * num_heads * (qk_dim + v_dim) * bytes of dtype` bytes of K/V: 16 KiB for
8 layers of 4 heads with 128 + 128 values in bfloat16.

- Device pool: `device_pages * page_size` tokens. On the CPU platform it is RAM: reserved at start
  (an error if the machine has not that much), taken as pages are first used.
- Host arena: `host_bytes`, rounded down to whole chunks of `chunk_size` tokens. Reserved and taken
  in the same way.
- Scratch pool: one layer of `max_uncut_tokens` tokens, allocated when a scratch run first needs it.

Only whole pages go to the host and survive an edit, so small pages keep more of short histories:
with histories of tens of events, take pages of 4 or 8 and chunks of 32 to 64. Large pages mean
shorter tables and fewer, larger copies.
"""

_COMMANDS = """\
## Options of the other commands

Each command takes `--config` too; the keys of its file are the names below. `mtserve evaluate` and
`mtserve replay` run the engine in their own process and print JSON. [Tools](tools.md) shows all of
them at work.
"""


def configuration() -> str:
    """Every option of the server, of the engine and of the commands."""
    lines = _CONFIGURATION.splitlines()
    flags = set(_flags_of(cli.ServeFlags))
    for section in sections_of(ServeConfig):
        if not section.options:
            continue
        rows = []
        for option in section.options:
            path = f"{section.path}.{option.name}".lstrip(".")
            rows.append((f"`{path}`", _flag(path, flags), *option[1:]))
        title = section.path or "The model"
        lines += ["", f"## {title}", "", section.summary, ""]
        lines += table(("option", "flag", "type", "default", "meaning"), rows)
    lines += ["", *_COMMANDS.splitlines()]
    for command, options_type in _command_options().items():
        rows = [
            (f"`--{option.name.replace('_', '-')}`", *option[1:])
            for option in options_of(options_type)
        ]
        lines += ["", f"### mtserve {command}", "", summary_of(options_type), ""]
        lines += table(("flag", "type", "default", "meaning"), rows)
    return "\n".join(lines) + "\n"


def _flag(path: str, flags: set[str]) -> str:
    if path in _WITHOUT_FLAG:
        return "file only"
    name = _RENAMED_FLAGS.get(path, path.rpartition(".")[2])
    if name not in flags:
        raise ValueError(f"{path} has no flag {name}: add it to cli.ServeFlags")
    return f"`--{name.replace('_', '-')}`"


def _command_options() -> Mapping[str, StructType]:
    """Options struct of each command; these modules load torch."""
    evaluate = importlib.import_module("engine.entrypoints.evaluate")
    replay = importlib.import_module("engine.entrypoints.replay")
    replay_server = importlib.import_module("engine.entrypoints.replay_server")
    collect_env = importlib.import_module("engine.entrypoints.collect_env")
    return {
        "evaluate": evaluate.EvaluateOptions,
        "replay": replay.ReplayOptions,
        "replay --server URL": replay_server.ServerReplayOptions,
        "conformance": cli.ConformanceOptions,
        "collect-env": collect_env.CollectEnvOptions,
    }


# Errors

_ERRORS = """\
# Errors

Every error that the engine raises on purpose is an `EngineError` of `engine.errors`. Its message
says what happened, the value, the limit and what to change. `limit` and `value` repeat the numbers
for machines; `Overloaded` also carries `retry_after_s`.
"""

_ERRORS_ON_THE_WIRE = """\
## On the wire

The HTTP status is the one of the table, the body is JSON:

```json
{"error": "candidates is empty: give at least one item", "code": "invalid_request",
 "request_id": "589b-6b0e9096-19"}
```

`limit` and `value` are there where the error has them. 429 has a `Retry-After` header. In a body
with several requests each failed one is such an object in its place, with its own `status`, and the
HTTP status is 200.

The server itself also sends `not_found` (404, no such route), `method_not_allowed` (405) and
`internal` (500, a fault of the server).

`history_needed` ends a [delta request](concepts.md#delta-requests) whose base the engine does not
hold any more: send the whole history, once. `cancelled` is what a request ends with when its client
leaves; nobody is there to read it. `transfer_error` does not leave the engine: a failed copy is a
miss, and the rows are recomputed.
"""


def error_page() -> str:
    """The tree of errors with codes and statuses."""
    lines = _ERRORS.splitlines()
    rows = []
    for error, depth in _descendants(errors.EngineError):
        name = "&nbsp;" * 4 * depth + f"`{error.__name__}`"
        meaning, _, _ = summary_of(error).partition("\n\n")
        rows.append((name, str(error.status), f"`{error.code}`", meaning))
    lines += ["", *table(("error", "status", "code", "meaning"), rows), ""]
    return "\n".join(lines + _ERRORS_ON_THE_WIRE.splitlines()) + "\n"


def _descendants(
    error: type[errors.EngineError], depth: int = 0
) -> Iterator[tuple[type[errors.EngineError], int]]:
    yield error, depth
    for child in error.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _descendants(child, depth + 1)


# State machines

_STATE_MACHINES = """\
# State machines

Each is a table `(state, event) -> state` in one file, with one `fire()`. A pair that
is not in the table is a bug and raises `InvariantError`, which names both. All are owned by the
core's thread.
"""

_INITIAL_AND_FINAL = {
    life: (life.State.WAITING, life.State.DONE),
    user_state: (user_state.Residency.ABSENT, user_state.Residency.ABSENT),
    weights_life: (weights_life.State.STANDBY, weights_life.State.RETIRED),
}
_TITLES = {
    life: "A request's life",
    user_state: "A user's residency",
    weights_life: "A weights version's life",
}


def state_machines() -> str:
    """A diagram of each transition table."""
    lines = _STATE_MACHINES.splitlines()
    for module, title in _TITLES.items():
        path = f"{module.__name__.replace('.', '/')}.py"
        initial, final = _INITIAL_AND_FINAL[module]
        lines += ["", f"## {title}", "", *_prose(module), "", f"Table: `{path}`.", ""]
        lines += _diagram(module.TRANSITIONS, initial, final)
    return "\n".join(lines) + "\n"


def _prose(module: types.ModuleType) -> list[str]:
    """The module's docstring without its first line and without drawings."""
    paragraphs = inspect.cleandoc(module.__doc__ or "").split("\n\n")[1:]
    kept = [paragraph for paragraph in paragraphs if not paragraph.startswith(" ")]
    return "\n\n".join(kept).splitlines()


def _diagram(
    transitions: Mapping[tuple[Enum, Enum], Enum], initial: Enum, final: Enum
) -> list[str]:
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {initial.value}"]
    lines += [
        f"    {before.value} --> {after.value}: {event.value}"
        for (before, event), after in transitions.items()
    ]
    return [*lines, f"    {final.value} --> [*]", "```"]


# The Open Inference Protocol

_WIRE = """\
# Wire reference

The [Open Inference Protocol](https://github.com/kserve/open-inference-protocol) v2, over HTTP and
over gRPC: what a request may hold and what its answer does. One request is one user. How to send
one is in the [quickstart](quickstart.md#7-send-tensors-as-bytes); several users at once, in plain
JSON, is what `POST /v1/rank` takes.

| | HTTP | gRPC |
|---|---|---|
| infer | `POST /v2/models/{model}[/versions/{version}]/infer` | `ModelInfer` |
| model metadata | `GET /v2/models/{model}[/versions/{version}]` | `ModelMetadata` |
| model ready | `GET /v2/models/{model}[/versions/{version}]/ready` | `ModelReady` |
| server metadata | `GET /v2` | `ServerMetadata` |
| alive | `GET /v2/health/live` | `ServerLive` |
| ready | `GET /v2/health/ready` | `ServerReady`, and `Check` and `Watch` of `grpc.health.v1` |

The service is `inference.GRPCInferenceService`, in `engine/entrypoints/grpc/inference.proto`.
A model also tells which of the inputs and outputs below it has in its metadata.
"""

_WIRE_VALUES = """\
## How values travel

**JSON.** `data` is the values row by row, as a flat list or nested like the shape.

**Binary tensors (HTTP).** The header `Inference-Header-Content-Length` tells the length of the JSON
at the start of the body. After it come the values of each input that has `binary_data_size`, in the
order of the inputs, with nothing between and nothing after them. Numbers are little-endian, row by
row; a BYTES element is four bytes of length and then its bytes. An answer with binary outputs is
made in the same way; its Content-Type is `application/octet-stream`. JSON and binary inputs and
outputs may be mixed.

**gRPC.** `raw_input_contents` holds those same bytes, one entry per input; or each input has its
values in `contents`, in the field of its datatype. All outputs come as the inputs came, raw or
typed, unless the parameter `binary_data_output` says otherwise.

A tensor whose bytes do not fit its shape and datatype is refused; nothing is cut or padded.
"""

_WIRE_ERRORS = """\
## Errors

Over HTTP an error is JSON, see [errors](errors.md). Over gRPC it is a status and its message; the
trailing metadata has `code`, where the error has them `limit` and `value`, and `retry-after`
(seconds) with RESOURCE_EXHAUSTED.
"""

_WIRE_METADATA = """\
## Headers and metadata

The same names over HTTP (headers) and gRPC (metadata):

- `x-request-id` is taken over if it is 1 to 128 visible ASCII characters, else one is made. It is
  in the answer (gRPC: in its trailing metadata), in errors and in the access log.
- `x-session-id` is the user id, for proxies that route by it. The option `server.routing_header`
  gives it another name.
- `authorization` or `x-api-key` is the key, if the server has keys. Health needs none.

The deadline of a gRPC call counts like `deadline_ms`. A call that is cancelled, and an HTTP client
that leaves, give their request up.
"""


def wire_reference() -> str:
    """Inputs, parameters, outputs and errors of the Open Inference Protocol."""
    statuses = importlib.import_module("engine.entrypoints.grpc.statuses")
    lines = _WIRE.splitlines()
    for title, tensors in (("Inputs", oip_schema.INPUTS), ("Outputs", oip_schema.OUTPUTS)):
        rows = [(f"`{one.name}`", one.datatype, one.shape, one.meaning) for one in tensors]
        lines += ["", f"## {title}", "", *table(("name", "datatype", "shape", "meaning"), rows)]
    lines += ["", "## Parameters", ""]
    lines += _field_table(oip_schema.InferParameters, ("type", "default"))
    lines += ["", "Of a tensor (HTTP only):", ""]
    lines += _field_table(oip_schema.TensorParameters, ("type",))
    lines += ["", "## Response parameters", "", *summary_of(UsageParameters).splitlines(), ""]
    lines += _field_table(UsageParameters, ("type",))
    lines += ["", *_WIRE_VALUES.splitlines(), "", *_WIRE_METADATA.splitlines(), ""]
    rows = [
        (f"`{error.code}`", str(error.status), f"`{statuses.status_code(error('')).name}`")
        for error, _ in _descendants(errors.EngineError)
        if error not in (errors.EngineError, errors.ConfigError, errors.RequestError)
    ]
    lines += [*_WIRE_ERRORS.splitlines(), "", *table(("code", "HTTP", "gRPC"), rows)]
    return "\n".join(lines) + "\n"


def _field_table(struct_type: StructType, columns: tuple[str, ...]) -> list[str]:
    """Name, some of type and default, and meaning of each field."""
    rows = []
    for option in options_of(struct_type):
        cells = {"type": option.kind, "default": option.default}
        rows.append((f"`{option.name}`", *(cells[column] for column in columns), option.meaning))
    return table(("name", *columns, "meaning"), rows)


PAGES: dict[str, Callable[[], str]] = {
    "wire-reference.md": wire_reference,
    "configuration.md": configuration,
    "metrics.md": metrics_export.markdown,
    "errors.md": error_page,
    "state-machines.md": state_machines,
    "native-api.md": native_api_page.native_api,
    "openapi.json": native_api_page.openapi_document,
}


def stale_pages(docs: Path = DOCS) -> list[str]:
    """Names of the pages whose file is missing or differs from what the code says."""
    stale = []
    for name, render in PAGES.items():
        path = docs / name
        if not path.exists() or path.read_text() != render():
            stale.append(name)
    return stale


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail when stale")
    is_check = parser.parse_args().check
    stale = stale_pages()
    for name in stale:
        if is_check:
            print(f"docs/{name} is out of date: run python scripts/generate_docs.py")
        else:
            (DOCS / name).write_text(PAGES[name]())
            print(f"wrote docs/{name}")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
