"""gRPC as public clients see it: tritonclient and the standard health stub, over a fake core."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.integration.certificates import Authority
from tests.integration.server_process import ServerProcess, eventually

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    flags = ["--grpc-port", "0", "--max-queue-requests", "3", "--max-body-bytes", "100000"]
    with ServerProcess(folder, *flags, fake=True) as running:
        yield running.until_ready()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.grpc_address) as connected:
        yield connected


@pytest.fixture
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc_address) as opened:
        yield opened


def tensor(name: str, values: Any, datatype: str = "INT64") -> triton.InferInput:
    types = {"INT64": np.int64, "FP32": np.float32, "BYTES": np.object_}
    array = np.array(values, types[datatype])
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def rank_inputs(user_id: str = "u") -> list[triton.InferInput]:
    return [
        tensor("user_id", [user_id], "BYTES"),
        tensor("history", [1, 2]),
        tensor("candidates", [4, 9]),
    ]


def waiting(server: ServerProcess) -> int:
    return int(server.get("/v1/status").body["requests_waiting"])


def requests_total(server: ServerProcess, outcome: str) -> float:
    text = server.get("/metrics").body.decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "mtserve_requests_total" and sample.labels["outcome"] == outcome
    )


def test_the_client_sees_the_server_and_the_model(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("fake")
    assert client.is_model_ready("fake", "7")
    assert not client.is_model_ready("fake", "8")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata().name == "mtserve"
    assert list(client.get_server_metadata().extensions) == ["binary_tensor_data"]
    metadata = client.get_model_metadata("fake", "7")
    assert list(metadata.versions) == ["7"]
    assert [(one.name, one.datatype, list(one.shape)) for one in metadata.inputs] == [
        ("user_id", "BYTES", [1]),
        ("history", "INT64", [-1]),
        ("history_action", "INT64", [-1]),
        ("history_mood", "FP32", [-1, 2]),
        ("candidate_mood", "FP32", [-1, 2]),
        ("context", "INT64", [1]),
        ("candidates", "INT64", [-1]),
    ]
    assert [one.name for one in metadata.outputs] == [
        "scores", "items", "item_scores", "user_embedding",
    ]  # fmt: skip


def test_the_client_ranks_with_raw_contents_and_several_outputs(
    client: triton.InferenceServerClient,
) -> None:
    mood = tensor("history_mood", [[0.5, 1.0], [2.0, 3.0]], "FP32")
    names = ("user_embedding", "item_scores", "scores", "items")
    answer = client.infer(
        "fake",
        [*rank_inputs(), mood, tensor("context", [5])],
        model_version="7",
        request_id="r1",
        outputs=[triton.InferRequestedOutput(name) for name in names],
        priority=2,
        timeout=30_000_000,
        parameters={"topk": 1, "namespace": "ns", "cache": "refresh", "deadline_ms": 2000},
    )
    assert answer.as_numpy("scores").tolist() == [[3004.0, 2996.0], [3009.0, 2991.0]]
    assert answer.as_numpy("items").tolist() == [9]
    assert answer.as_numpy("items").dtype == np.int64
    assert answer.as_numpy("item_scores").tolist() == [3009.0]
    assert answer.as_numpy("user_embedding").tolist() == [3000.0] * 4
    message = answer.get_response()
    assert (message.id, message.model_name, message.model_version) == ("r1", "fake", "7")
    assert [output.name for output in message.outputs] == list(names)
    assert len(message.raw_output_contents) == 4
    assert message.parameters["computed_tokens"].int64_param == 2
    assert message.parameters["fingerprint"].string_param == "00ff"


def test_typed_contents_are_answered_with_typed_contents(channel: grpc.Channel) -> None:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    request = service_pb2.ModelInferRequest(model_name="fake")
    user = request.inputs.add(name="user_id", datatype="BYTES", shape=[1])
    user.contents.bytes_contents.append(b"u")
    history = request.inputs.add(name="history", datatype="INT64", shape=[2])
    history.contents.int64_contents.extend([1, 2])
    request.parameters["topk"].int64_param = 2
    answer = stub.ModelInfer(request)
    assert not answer.raw_output_contents
    items, item_scores = answer.outputs
    assert list(items.contents.int64_contents) == [0, 1]
    assert list(item_scores.contents.fp32_contents) == [3000.0, 2999.0]
    request.parameters["binary_data_output"].bool_param = True
    assert stub.ModelInfer(request).raw_output_contents[0] == bytes(8) + b"\1" + bytes(7)


@pytest.mark.parametrize(
    ("keywords", "status", "names"),
    [
        ({"model_name": "other"}, "NOT_FOUND", "'other' is not loaded"),
        ({"model_version": "8"}, "NOT_FOUND", "version '8'"),
        ({"parameters": {"tokp": 1}}, "INVALID_ARGUMENT", "tokp"),
        ({"inputs": rank_inputs()[:1]}, "INVALID_ARGUMENT", "history is missing"),
        ({"inputs": rank_inputs("bad")}, "INVALID_ARGUMENT", "bad user"),
        (
            {"headers": {"x-session-id": "v"}},
            "INVALID_ARGUMENT",
            "'u', but the routing header says 'v'",
        ),
        ({"inputs": [tensor("context", [0] * 20_000)]}, "RESOURCE_EXHAUSTED", "larger than max"),
    ],
)
def test_faults_have_their_status(
    client: triton.InferenceServerClient, keywords: dict[str, Any], status: str, names: str
) -> None:
    call = {"model_name": "fake", "inputs": rank_inputs(), **keywords}
    with pytest.raises(triton.InferenceServerException, match=names) as raised:
        client.infer(**call)
    assert raised.value.status() == f"StatusCode.{status}"


def test_an_error_has_its_numbers_in_the_trailing_metadata(channel: grpc.Channel) -> None:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    request = service_pb2.ModelInferRequest(model_name="fake", raw_input_contents=[b"12345"])
    request.inputs.add(name="history", datatype="INT64", shape=[1])
    with pytest.raises(grpc.RpcError) as raised:
        stub.ModelInfer(request, metadata=(("x-request-id", "mine"),))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "'history' has 5 bytes" in raised.value.details()
    assert dict(raised.value.trailing_metadata()) == {
        "x-request-id": "mine", "code": "invalid_request", "limit": "8", "value": "5",
    }  # fmt: skip


def test_bytes_that_are_no_message_are_the_clients_fault(channel: grpc.Channel) -> None:
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.RpcError) as raised:
        infer(b"\xff\xff\xff")
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    missing = channel.unary_unary("/inference.GRPCInferenceService/RepositoryIndex")
    with pytest.raises(grpc.RpcError) as raised:
        missing(b"")
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_request_id_is_echoed_or_made(channel: grpc.Channel) -> None:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def id_of(*sent: tuple[str, str]) -> str:
        _, call = stub.ServerLive.with_call(service_pb2.ServerLiveRequest(), metadata=sent)
        return str(dict(call.trailing_metadata())["x-request-id"])

    assert id_of(("x-request-id", "mine")) == "mine"
    made = id_of(), id_of(("x-request-id", "x" * 200))
    assert made[0] != made[1]
    assert all(1 < len(one) <= 128 for one in made)


def test_a_cancelled_call_gives_its_request_up(
    server: ServerProcess, client: triton.InferenceServerClient
) -> None:
    before = requests_total(server, "cancelled")
    call = client.async_infer("fake", rank_inputs("hold"), callback=lambda result, error: None)
    eventually(lambda: waiting(server) == 1, "the request is pending")
    call.cancel()
    eventually(lambda: waiting(server) == 0, "the request is given up")
    eventually(lambda: requests_total(server, "cancelled") == before + 1, "it is counted")


def test_a_calls_deadline_ends_the_request(
    server: ServerProcess, client: triton.InferenceServerClient
) -> None:
    with pytest.raises(triton.InferenceServerException) as raised:
        client.infer("fake", rank_inputs("hold"), client_timeout=0.2)
    assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    eventually(lambda: waiting(server) == 0, "the request is given up")


def test_a_full_queue_says_when_to_retry(
    server: ServerProcess, client: triton.InferenceServerClient, channel: grpc.Channel
) -> None:
    held = [
        client.async_infer("fake", rank_inputs("hold"), callback=lambda result, error: None)
        for _ in range(3)
    ]
    eventually(lambda: waiting(server) == 3, "the queue is full")
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    request = service_pb2.ModelInferRequest(model_name="fake")
    user = request.inputs.add(name="user_id", datatype="INT64", shape=[1])
    user.contents.int64_contents.append(5)
    request.inputs.add(name="history", datatype="INT64", shape=[0])
    with pytest.raises(grpc.RpcError) as raised:
        stub.ModelInfer(request)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(raised.value.trailing_metadata())
    assert (trailing["code"], trailing["limit"], trailing["retry-after"]) == (
        "overloaded",
        "3",
        "2",
    )
    for call in held:
        call.cancel()
    eventually(lambda: waiting(server) == 0, "the queue is empty")


def test_the_standard_health_service_answers(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "inference.GRPCInferenceService"):
        asked = health_pb2.HealthCheckRequest(service=name)
        assert health.Check(asked).status == SERVING
    with pytest.raises(grpc.RpcError) as raised:
        health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_drain_turns_health_off_and_ends_what_is_left(tmp_path: Path) -> None:
    flags = ["--grpc-port", "0", "--drain-timeout-s", "1.5"]
    with ServerProcess(tmp_path, *flags, fake=True) as server:
        server.until_ready()
        with triton.InferenceServerClient(server.grpc_address) as client:
            ended: list[Any] = []
            client.async_infer(
                "fake", rank_inputs("hold"), callback=lambda result, error: ended.append(error)
            )
            eventually(lambda: waiting(server) == 1, "the request is pending")
            with grpc.insecure_channel(server.grpc_address) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
                assert next(watch).status == SERVING
                server.send_signal(signal.SIGTERM)
                assert next(watch).status == NOT_SERVING
                assert client.is_server_live()
                with pytest.raises(triton.InferenceServerException) as raised:
                    client.infer("fake", rank_inputs())
                assert raised.value.status() == "StatusCode.UNAVAILABLE"
                assert list(watch) == []  # it ends by itself: nothing has to wait for it
            eventually(lambda: ended, "the pending call has ended")
            assert ended[0].status() == "StatusCode.UNAVAILABLE"
        assert server.wait() == 0


def test_keys_open_inference_and_health_needs_none(tmp_path: Path) -> None:
    flags = ["--grpc-port", "0", "--api-key", "the-key"]
    with ServerProcess(tmp_path, *flags, fake=True) as server:
        server.until_ready()
        with (
            triton.InferenceServerClient(server.grpc_address) as client,
            grpc.insecure_channel(server.grpc_address) as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            assert health.Check(health_pb2.HealthCheckRequest()).status == SERVING
            assert client.is_server_ready()
            assert client.is_model_ready("fake")
            for headers in ({}, {"authorization": "Bearer wrong"}):
                for call in (
                    lambda headers=headers: client.infer("fake", rank_inputs(), headers=headers),
                    lambda headers=headers: client.get_server_metadata(headers=headers),
                    lambda headers=headers: client.get_model_metadata("fake", headers=headers),
                ):
                    with pytest.raises(triton.InferenceServerException) as raised:
                        call()
                    assert raised.value.status() == "StatusCode.UNAUTHENTICATED"
            headers = {"authorization": "Bearer the-key"}
            assert client.get_server_metadata(headers=headers).name == "mtserve"
            answer = client.infer("fake", rank_inputs(), headers=headers)
            assert answer.as_numpy("scores").shape == (2, 2)


def test_tls_covers_grpc_and_asks_for_the_clients_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    signed = authority.sign("server"), authority.sign("client")
    flags = ["--tls-cert", str(signed[0].cert), "--tls-key", str(signed[0].key),
             "--tls-client-ca", str(authority.cert)]  # fmt: skip
    with ServerProcess(tmp_path, "--grpc-port", "0", *flags, fake=True) as server:
        eventually(lambda: " ready: " in server.log, "ready")
        root = authority.cert.read_bytes()
        pair = {"private_key": signed[1].key.read_bytes(),
                "certificate_chain": signed[1].cert.read_bytes()}  # fmt: skip
        asked = health_pb2.HealthCheckRequest()
        known = grpc.ssl_channel_credentials(root, **pair)
        with grpc.secure_channel(server.grpc_address, known) as channel:
            assert health_pb2_grpc.HealthStub(channel).Check(asked).status == SERVING
        strangers = (
            grpc.secure_channel(server.grpc_address, grpc.ssl_channel_credentials(root)),
            grpc.insecure_channel(server.grpc_address),
        )
        for channel in strangers:
            with channel, pytest.raises(grpc.RpcError) as raised:
                health_pb2_grpc.HealthStub(channel).Check(asked)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_call_is_in_the_access_log_without_its_user(
    server: ServerProcess, client: triton.InferenceServerClient
) -> None:
    client.infer("fake", rank_inputs("somebody"), headers={"x-request-id": "logged"})
    eventually(lambda: "logged GRPC /inference.GRPCInferenceService/ModelInfer 200" in server.log,
               "the line is there")  # fmt: skip
    (line,) = [line for line in server.log.splitlines() if " logged GRPC " in line]
    assert "computed_tokens=2" in line
    assert "somebody" not in server.log


def test_a_taken_grpc_port_is_a_config_error(server: ServerProcess, tmp_path: Path) -> None:
    port = server.grpc_address.rpartition(":")[2]
    with ServerProcess(tmp_path, "--grpc-port", port) as second:
        assert second.wait() == 2
    assert f"cannot listen for gRPC on 127.0.0.1:{port}" in second.log
    assert "Traceback" not in second.log


def test_grpc_without_grpcio_is_a_config_error_with_the_remedy() -> None:
    script = (
        "import sys; sys.modules['grpc'] = None\n"
        "from engine.entrypoints.cli import main\n"
        "sys.exit(main(['serve', '--port', '0', '--grpc-port', '0']))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "pip install mtserve[grpc]" in ended.stderr
    assert "Traceback" not in ended.stderr
