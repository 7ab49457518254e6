"""The services around Generate: health, reflection, admin, and the process."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.client import AsyncBatonClient, BatonClient
from baton.core.errors import (
    ConfigInvalid,
    ModelFileDamaged,
    ModelMissing,
    NoWorker,
    PortInUse,
    PromptTooLong,
    from_wire,
)
from baton.proto.wire import error_from_rpc
from baton.router.__main__ import parse
from baton.router.served_model import ServedModel
from baton.router.server import RouterConfig, RouterServer, why_not_bound
from baton.tests.patience import STALLS_S
from baton.tests.router.fakes import MODEL, TOKENIZER, cluster

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.asyncio
async def test_health_follows_the_workers():
    async with cluster(num_prefill=1, num_decode=0, alive_s=0.6) as running:
        health = health_pb2_grpc.HealthStub(running.channel)

        async def becomes(want):
            async with asyncio.timeout(10.0):
                for service in ("", "baton.v1.Inference"):
                    while (await health.Check(health_pb2.HealthCheckRequest(service=service))).status != want:
                        await asyncio.sleep(0.01)

        await becomes(NOT_SERVING)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        await running.add("decode", "decode-0")
        await becomes(SERVING)
        running.silent.add("decode-0")
        await becomes(NOT_SERVING)
        running.silent.clear()
        await becomes(SERVING)
        assert [(await watch.read()).status for _ in range(3)] == [SERVING, NOT_SERVING, SERVING]
        watch.cancel()


@pytest.mark.fast
@pytest.mark.asyncio
async def test_reflection_lists_the_services():
    async with cluster(0, 0) as running:
        stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="baton.v1.Inference"),
        ]
        replies = [reply async for reply in stub.ServerReflectionInfo(iter(asked))]
        names = {service.name for service in replies[0].list_services_response.service}
        assert {"baton.v1.Inference", "baton.v1.Admin", "baton.v1.Membership", "grpc.health.v1.Health"} <= names
        assert replies[1].file_descriptor_response.file_descriptor_proto


@pytest.mark.asyncio
async def test_admin_and_model():
    async with cluster(num_prefill=1, num_decode=1) as running, AsyncBatonClient(running.address) as client:
        model = await client.model()
        assert (model.name, model.max_model_len, model.vocab_size, model.num_draft_tokens) == (MODEL, 200, 257, 2)
        assert (model.numerics, model.dtype) == ("default", "float32")
        assert await client.tokenize("hi") == TOKENIZER.encode("hi")
        sizes = [len(chunk.token_ids) async for chunk in client.generate("hi")]
        status = await client.status()
        assert (status.model, status.num_requests_finished, status.num_tokens_streamed) == (MODEL, 1, 11)
        assert [worker.state.worker_id for worker in status.workers] == ["decode-0", "prefill-0"]
        assert all(worker.alive and worker.heartbeat_age_s < STALLS_S for worker in status.workers)
        inventory = await client.inventory()
        assert [worker.state.inventory.num_blocks for worker in inventory.workers] == [10, 10]
        metrics = running.router.metrics.render()
        assert 'baton_requests_finished_total{reason="length"} 1.0' in metrics
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert f"baton_{name}_seconds_count 1.0" in metrics
        spans = ("e2e_request_latency", "request_queue_time")
        whole, queued = (re.search(rf"^baton_{name}_seconds_sum (\S+)$", metrics, re.MULTILINE) for name in spans)
        assert 0 < float(queued[1]) < float(whole[1])
        # A reader that is behind gets what waits in one chunk, so there may be fewer than the worker's five frames.
        assert len(sizes) <= 6
        gaps = re.search(r"^baton_inter_token_latency_seconds_count (\S+)$", metrics, re.MULTILINE)
        assert float(gaps[1]) == sum(size > 0 for size in sizes) - 1
        assert "baton_num_streams_open 0.0" in metrics
        assert 'baton_kv_cache_usage{role="decode",worker="decode-0"} 0.0' in metrics


@pytest.mark.asyncio
async def test_inventory_tells_who_does_not_answer_and_leaves_out_the_dead():
    async with cluster(alive_s=0.6) as running, AsyncBatonClient(running.address) as client:
        running.silent.add("decode-0")
        await running.of("decode")[0].server.stop(None)
        alive = {worker.state.worker_id: worker.alive for worker in (await client.inventory()).workers}
        assert alive == {"decode-0": False, "prefill-0": True}
        async with asyncio.timeout(10.0):
            while running.router.members.live("decode"):
                await asyncio.sleep(0.02)
        assert [worker.state.worker_id for worker in (await client.inventory()).workers] == ["prefill-0"]
        assert [worker.alive for worker in (await client.status()).workers] == [False, True]
        with pytest.raises(NoWorker):
            await client.model()


@pytest.mark.fast
@pytest.mark.asyncio
async def test_a_taken_port_is_named():
    model = ServedModel(MODEL, TOKENIZER, 257)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = RouterConfig(host="127.0.0.1", port=port, max_queue_len=1, request_timeout_s=1.0)
        with pytest.raises(PortInUse) as caught:
            await RouterServer(config, model).start()
        assert caught.value.fields == {"host": "127.0.0.1", "port": port}
    assert isinstance(why_not_bound("no.such.host.invalid", 1), ConfigInvalid)
    assert isinstance(why_not_bound("192.0.2.1", 0), ConfigInvalid)


def write_model(directory, config='{"vocab_size": 257}'):
    (directory / "tokenizer.json").write_text(TOKENIZER._fast.to_str(), encoding="utf-8")
    (directory / "config.json").write_text(config, encoding="utf-8")
    return directory


@pytest.mark.fast
def test_model_directories(tmp_path):
    model = ServedModel.from_directory("m", write_model(tmp_path))
    assert (model.name, model.vocab_size, model.tokenizer.encode("a")) == ("m", 257, TOKENIZER.encode("a"))
    assert ServedModel.from_directory("m", write_model(tmp_path, '{"text_config": {"vocab_size": 9}}')).vocab_size == 9
    for config in ("", "[]", "{}", '{"vocab_size": null}'):
        with pytest.raises(ModelFileDamaged):
            ServedModel.from_directory("m", write_model(tmp_path, config))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelMissing):
        ServedModel.from_directory("m", tmp_path)


@pytest.mark.fast
def test_the_command_line_refuses_nonsense(capsys):
    good = ["--model-name", "m", "--model-path", "p"]
    assert parse(good).request_timeout_s == 600.0
    for bad in (
        ["--request-timeout-s", "nan"],
        ["--max-queue-len", "0"],
        ["--unknown"],
        ["--port", "x"],
        ["--port", "65536"],
        ["--http-port", "-1"],
        ["--metrics-port", "70000"],
        ["--admin-port", "70000"],
        ["--max-connections", "0"],
        ["--max-prompt-tokens", "-5"],
        ["--max-message-mib", "0"],
        ["--trace-share", "1.5"],
        ["--trace-share", "nan"],
        ["--chat-template", "chatml"],
    ):
        with pytest.raises(SystemExit) as caught:
            parse([*good, *bad])
        assert caught.value.code == 2
        assert f"{bad[0]}: " in capsys.readouterr().err.replace("arguments", f"{bad[0]}")
    least = parse([*good, "--port", "0", "--admin-port", "65535", "--trace-share", "0", "--max-connections", "1"])
    assert (least.port, least.admin_port, least.trace_share, least.max_connections) == (0, 65535, 0.0, 1)


def start(tmp_path, *more):
    command = [sys.executable, "-P", "-m", "baton.router", "--model-name", MODEL, "--model-path", str(tmp_path), *more]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=tmp_path, **pipes)


def finish(process):
    out, err = process.communicate(timeout=10)
    return process.returncode, out, err.decode()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "parent"])
def test_the_process_says_its_port_and_ends_when_asked(tmp_path, how):
    process = start(write_model(tmp_path), "--port", "0", "--exit-with-parent", "--metrics-port", "0")
    ports = json.loads(process.stdout.readline())
    with BatonClient(f"127.0.0.1:{ports['grpc_port']}", timeout_s=5.0) as client:
        assert client.status().model == MODEL
    with urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics_port']}/metrics") as reply:
        assert b"baton_num_streams_open 0.0" in reply.read()
    if how != "parent":
        os.kill(process.pid, how)
        process.wait(10)
    code, out, err = finish(process)
    assert (code, out) == (0, b""), err
    assert "Traceback" not in err


def test_the_process_says_why_it_did_not_start(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, out, err = finish(start(write_model(tmp_path), "--port", str(taken.getsockname()[1])))
    assert (code, out) == (3, b"")
    assert isinstance(from_wire(err.splitlines()[-1]), PortInUse)
    code, _, err = finish(start(tmp_path / "..", "--port", "0"))
    assert code == 3
    assert isinstance(from_wire(err.splitlines()[-1]), ModelMissing)


@pytest.mark.asyncio
async def test_a_message_beyond_the_limit_is_refused():
    async with cluster(0, 0) as running:
        call = running.channel.unary_unary("/baton.v1.Inference/Tokenize")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\x12" + b"x" * (17 << 20))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert type(error_from_rpc(caught.value)) is PromptTooLong
