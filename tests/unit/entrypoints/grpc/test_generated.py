"""The committed messages are those of the proto, and live beside a public client's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from scripts import generate_grpc


@pytest.mark.skipif(
    importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed"
)
def test_the_committed_messages_are_those_of_the_proto() -> None:
    assert not generate_grpc.is_stale()


@pytest.mark.parametrize(
    "order",
    [
        ("tritonclient.grpc.service_pb2", "engine.entrypoints.grpc.inference_pb2"),
        ("engine.entrypoints.grpc.inference_pb2", "tritonclient.grpc.service_pb2"),
    ],
)
def test_the_messages_live_beside_those_of_a_client(order: tuple[str, str]) -> None:
    script = (
        f"import {order[0]}, {order[1]}\n"
        "from engine.entrypoints.grpc.inference_pb2 import ModelInferRequest as Ours\n"
        "from tritonclient.grpc.service_pb2 import ModelInferRequest as Theirs\n"
        "ours = Ours(model_name='m', raw_input_contents=[b'x'])\n"
        "ours.parameters['topk'].int64_param = 3\n"
        "theirs = Theirs.FromString(ours.SerializeToString())\n"
        "assert (theirs.model_name, theirs.parameters['topk'].int64_param) == ('m', 3)\n"
        "assert Ours.FromString(theirs.SerializeToString()) == ours\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
