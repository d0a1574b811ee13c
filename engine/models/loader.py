"""Reading and writing model directories: `config.json` and `model.safetensors`.

`docs/model-directory.md` describes the format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.models.base import Model
from engine.models.config import ModelConfig
from engine.models.hstu.tensors import Shape, expected_shapes

CONFIG_FILE = "config.json"
TENSOR_FILE = "model.safetensors"


def load_model_dir(path: str | os.PathLike[str]) -> Model:
    """The model of a directory, ready to run on the CPU.

    Raises ConfigError that names the file, and the key or all the tensors that do not fit.
    """
    from engine.models.registry import model_factory

    directory = Path(path)
    config = _read_config(directory / CONFIG_FILE)
    layers = config.get("layers")
    architecture = layers.get("architecture", "hstu") if isinstance(layers, dict) else "hstu"
    if not isinstance(architecture, str):
        raise ConfigError(
            f"{directory / CONFIG_FILE}: layers.architecture is {architecture!r}: give a name"
        )
    factory = model_factory(architecture)
    return factory(config, _read_tensors(directory / TENSOR_FILE), str(directory))


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
        if name == "catalogue.item_ids":
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
    _check_catalogue(config, tensors["catalogue.item_ids"], source)


def _check_catalogue(config: ModelConfig, item_ids: torch.Tensor, source: str) -> None:
    num_items, first_row = len(item_ids), config.catalogue.first_row
    num_rows = config.inputs.features[0].num_rows
    problem = None
    if not num_items:
        problem = "is empty"
    elif first_row + num_items > num_rows:
        problem = (
            f"has {num_items} items from row {first_row} on, but embeddings.item has {num_rows} "
            "rows: raise num_rows of the feature `item`"
        )
    elif int(item_ids.min()) < 0:
        problem = f"holds the negative id {int(item_ids.min())}"
    else:
        ordered = np.sort(item_ids.numpy())
        is_repeated = ordered[1:] == ordered[:-1]
        if is_repeated.any():
            problem = f"holds id {int(ordered[1:][is_repeated][0])} more than once"
    if problem is not None:
        raise ConfigError(f"{source}: catalogue.item_ids {problem}")


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


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
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
