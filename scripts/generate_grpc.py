"""Write `engine/entrypoints/grpc/inference_pb2.py` and its types out of `inference.proto`.

    python scripts/generate_grpc.py [--check]

Needs grpcio-tools. Two things in what protoc writes are changed, so that the module can live beside
public clients of the same protocol in one process:

- The messages go into a descriptor pool of their own: the default one refuses a second definition
  of `inference.ModelInferRequest`, which such clients bring too.
- The check of the protobuf runtime's version is left out: it refuses a runtime older than the
  generator, and clients pin older ones. What is generated is plain descriptors, which all runtimes
  since 5 read.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FOLDER = ROOT / "engine" / "entrypoints" / "grpc"
PROTO = FOLDER / "inference.proto"
GENERATED = ("inference_pb2.py", "inference_pb2.pyi")

_VERSION_CHECK = re.compile(
    r"from google\.protobuf import runtime_version.*\n|"
    r"_runtime_version\.ValidateProtobufRuntimeVersion\((?:.|\n)*?\n\)\n"
)
_DEFAULT_POOL = "_descriptor_pool.Default()"
_OWN_POOL = "_descriptor_pool.DescriptorPool()"


def protoc(*options: str) -> None:
    """Run protoc on the proto. Raises RuntimeError if it fails."""
    from grpc_tools import protoc as compiler

    status = compiler.main(["protoc", f"-I{FOLDER}", *options, PROTO.name])
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")


def generated_files() -> dict[str, str]:
    """Name and content of each generated file."""
    with tempfile.TemporaryDirectory() as folder:
        protoc(f"--python_out={folder}", f"--pyi_out={folder}")
        files = {name: (Path(folder) / name).read_text() for name in GENERATED}
    module, num_removed = _VERSION_CHECK.subn("", files["inference_pb2.py"])
    if num_removed != 2 or module.count(_DEFAULT_POOL) != 1:
        raise RuntimeError("protoc writes another kind of module now: adapt this script")
    files["inference_pb2.py"] = module.replace(_DEFAULT_POOL, _OWN_POOL)
    return files


def is_stale() -> bool:
    """Whether the committed module describes other messages than the proto does.

    Compares descriptors, not text, so the version of grpcio-tools does not matter.
    """
    from google.protobuf import descriptor_pb2

    from engine.entrypoints.grpc import inference_pb2

    with tempfile.NamedTemporaryFile() as compiled:
        protoc(f"--descriptor_set_out={compiled.name}")
        (wanted,) = descriptor_pb2.FileDescriptorSet.FromString(compiled.read()).file
    present = descriptor_pb2.FileDescriptorProto.FromString(inference_pb2.DESCRIPTOR.serialized_pb)
    for file in (wanted, present):
        _drop_json_names(file.message_type)
    return bool(wanted != present)


def _drop_json_names(messages: object) -> None:
    """Some versions write the derived JSON names down, some do not."""
    for message in messages:  # type: ignore[attr-defined]
        for field in message.field:
            field.ClearField("json_name")
        _drop_json_names(message.nested_type)


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail when stale")
    if parser.parse_args().check:
        if is_stale():
            print("inference_pb2.py is out of date: run python scripts/generate_grpc.py")
            return 1
        return 0
    for name, content in generated_files().items():
        (FOLDER / name).write_text(content)
        print(f"wrote {(FOLDER / name).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
