"""Reading and writing model directories: `config.json` and `model.safetensors`.

`docs/model-directory.md` describes the format.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.errors import ConfigError
from engine.models.base import ItemCatalogue, Model
from engine.models.catalogue import check_item_ids
from engine.models.config import Catalogue, ModelConfig
from engine.models.hstu.tensors import Shape, expected_shapes

CONFIG_FILE = "config.json"
TENSOR_FILE = "model.safetensors"
ITEM_IDS = "catalogue.item_ids"
ITEM_TABLE = "embeddings.item"


def load_model_dir(path: str | os.PathLike[str], weights_version: str | None = None) -> Model:
    """The model of a directory, ready to run on the CPU.

    weights_version: Instead of the one that config.json names.
    Raises ConfigError that names the file, and the key or all the tensors that do not fit.
    """
    from engine.models.registry import model_factory

    directory = Path(path)
    config = _read_config(directory / CONFIG_FILE)
    if weights_version is not None:
        config["weights_version"] = weights_version
    layers = config.get("layers")
    architecture = layers.get("architecture", "hstu") if isinstance(layers, dict) else "hstu"
    if not isinstance(architecture, str):
        raise ConfigError(
            f"{directory / CONFIG_FILE}: layers.architecture is {architecture!r}: give a name"
        )
    factory = model_factory(architecture)
    return factory(config, _read_tensors(directory / TENSOR_FILE), str(directory))


def load_catalogue(path: str | os.PathLike[str]) -> ItemCatalogue:
    """The catalogue of a model directory, for `Model.with_catalogue`: its item ids, their table
    and the section `catalogue` of config.json. Everything else in the directory is ignored.

    Raises ConfigError that names the file, and the key or the tensor.
    """
    directory = Path(path)
    config = _read_config(directory / CONFIG_FILE)
    try:
        settings = msgspec.convert(config.get("catalogue", {}), Catalogue)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{directory / CONFIG_FILE}: catalogue: {error}") from error
    file = directory / TENSOR_FILE
    tensors = _read_tensors(file, only=(ITEM_IDS, ITEM_TABLE))
    item_ids, table = tensors[ITEM_IDS], tensors[ITEM_TABLE]
    if item_ids.dtype != torch.int64 or item_ids.dim() != 1:
        raise ConfigError(
            f"{file}: {ITEM_IDS} is {_dtype_text(item_ids)} {list(item_ids.shape)}, expected int64 "
            "[num_items]"
        )
    if not table.is_floating_point() or table.dim() != 2:
        raise ConfigError(
            f"{file}: {ITEM_TABLE} is {_dtype_text(table)} {list(table.shape)}, expected a float "
            "type [num_rows, width]"
        )
    return ItemCatalogue(settings=settings, item_ids=item_ids.numpy(), table=table)


def save_model_dir(
    path: str | os.PathLike[str], config: ModelConfig, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write a model directory, creating it if needed and replacing its two files.

    The tensors are checked against the config as loading does; they are not modified.
    Raises ConfigError that lists all tensors that do not fit.
    """
    check_tensors(config, tensors, f"tensors for {path}")
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    tensor_part = directory / (TENSOR_FILE + ".part")
    save_file(contiguous, tensor_part)
    config_part = directory / (CONFIG_FILE + ".part")
    config_part.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    # safetensors lets nobody but the owner read its file; both get what the umask gives.
    tensor_part.chmod(stat.S_IMODE(config_part.stat().st_mode))
    tensor_part.replace(directory / TENSOR_FILE)
    config_part.replace(directory / CONFIG_FILE)


def decode_config(config: Mapping[str, Any], source: str) -> ModelConfig:
    """The HSTU config of a parsed config.json; ConfigError names the source and the key."""
    try:
        return msgspec.convert(config, ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}") from error


def check_tensors(config: ModelConfig, tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Raise one ConfigError with every missing, surplus, misshapen, mistyped or unusable tensor."""
    expected = expected_shapes(config)
    problems = []
    for name, shape in expected.items():
        if name not in tensors:
            problems.append(f"{name} {_shape_text(shape)} is missing")
            continue
        tensor = tensors[name]
        if not _fits(tuple(tensor.shape), shape):
            problems.append(f"{name} is {list(tensor.shape)}, expected {_shape_text(shape)}")
        if name == ITEM_IDS:
            if tensor.dtype != torch.int64:
                problems.append(f"{name} is {_dtype_text(tensor)}, expected int64")
        elif not tensor.is_floating_point():
            problems.append(f"{name} is {_dtype_text(tensor)}, expected a float type")
        elif not torch.isfinite(tensor.float()).all():
            problems.append(f"{name} holds NaN, infinity or values beyond float32")
    problems += [f"{name} {list(tensors[name].shape)} is surplus: the config does not read it"
                 for name in tensors if name not in expected]  # fmt: skip
    if problems:
        raise ConfigError(f"{source}: " + "; ".join(problems))
    check_item_ids(
        tensors[ITEM_IDS].numpy(),
        config.inputs.features[0].num_rows,
        config.catalogue.first_row,
        source,
    )


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file} is missing: a model directory holds {CONFIG_FILE} and {TENSOR_FILE}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds a {type(config).__name__}: expected an object")
    return config


def _read_tensors(file: Path, only: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """All tensors, or only the named ones; a named one that is not there is a ConfigError."""
    try:
        with safe_open(file, framework="pt") as stored:
            held = list(stored.keys())
            missing = [name for name in only or () if name not in held]
            if missing:
                raise ConfigError(f"{file}: {', '.join(missing)} is missing")
            return {name: stored.get_tensor(name) for name in only or held}
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file} is missing: a model directory holds {CONFIG_FILE} and {TENSOR_FILE}"
        ) from error
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _fits(actual: tuple[int, ...], expected: Shape) -> bool:
    return len(actual) == len(expected) and all(
        want is None or have == want for have, want in zip(actual, expected, strict=True)
    )


def _shape_text(shape: Shape) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"


def _dtype_text(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
