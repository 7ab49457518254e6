"""Asking a deployment: the stream, its errors, status and inventory, against a stand-in server."""

import json
import sys
import threading
import time
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest

from baton.cluster import admin, cli
from baton.cluster.commands import demo
from baton.cluster.commands.completion import Completion, CompletionArguments, Interrupted, complete_remotely
from baton.core.errors import BatonError, InvalidSampling, Overloaded, StartupError, WorkerLost
from baton.proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, wire, worker_pb2
from baton.tests.router.certificates import Authority

pytestmark = pytest.mark.fast


class Front(inference_pb2_grpc.InferenceServicer, admin_pb2_grpc.AdminServicer):
    """Answers with `chunks`, then fails with `error` if there is one."""

    def __init__(self):
        self.requests = []
        self.chunks = []
        self.error = None
        self.num_blocks_free = 100
        self.alive = True
        self.delay_s = 0.0
        self.fault = ""

    def Generate(self, request, context):
        self.requests.append(request)
        time.sleep(self.delay_s)
        if self.fault:
            context.abort(grpc.StatusCode.INTERNAL, self.fault)
        yield from self.chunks
        if self.error is not None:
            context.set_trailing_metadata((("baton-error", self.error.to_wire()),))
            context.abort(getattr(grpc.StatusCode, self.error.grpc_code), self.error.message)

    def _worker(self):
        inventory = worker_pb2.Inventory(num_blocks=100, num_blocks_free=self.num_blocks_free)
        state = worker_pb2.WorkerState(worker_id="decode-0", role="decode", epoch=2**63 + 1, inventory=inventory)
        return admin_pb2.WorkerStatus(state=state, alive=self.alive, num_epochs=2, heartbeat_age_s=0.25)

    def Status(self, request, context):
        if self.fault:
            context.abort(grpc.StatusCode.INTERNAL, self.fault)
        return admin_pb2.StatusReply(model="tiny", workers=[self._worker()])

    def Inventory(self, request, context):
        return admin_pb2.InventoryReply(workers=[self._worker()])


@pytest.fixture
def front():
    server = grpc.server(futures.ThreadPoolExecutor(2))
    front = Front()
    inference_pb2_grpc.add_InferenceServicer_to_server(front, server)
    admin_pb2_grpc.add_AdminServicer_to_server(front, server)
    front.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield front
    server.stop(0).wait()


def finished_chunks():
    stats = inference_pb2.RequestStats(
        prompt_len=3, output_len=3, seed=5, ttft_ms=1.5, tpot_ms=0.5, num_draft_tokens=4, num_accepted_tokens=1
    )
    return [
        inference_pb2.GenerateChunk(index=0, token_ids=[7], text="a"),
        inference_pb2.GenerateChunk(
            index=1, token_ids=[8, 9], text="bc", finish=inference_pb2.Finish(reason="length", stats=stats)
        ),
    ]


def run_cli(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["baton", *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    captured = capsys.readouterr()
    return exit.value.code, captured.out, captured.err


def test_a_stream_becomes_a_completion(front):
    front.chunks = finished_chunks()
    shown = []
    completion = complete_remotely(
        front.address, CompletionArguments(prompt="x", max_tokens=3, stop=("end",)), shown.append
    )
    assert shown == ["a", "bc"]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("abc", (7, 8, 9), "length")
    sampling = front.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, list(sampling.stop)) == (3, 0.0, ["end"])
    assert not sampling.HasField("top_k")
    assert not sampling.HasField("top_p")


def test_the_json_object_holds_what_is_documented(front, monkeypatch, capsys):
    front.chunks = finished_chunks()
    code, out, _ = run_cli(monkeypatch, capsys, "generate", "--address", front.address, "--prompt", "x", "--json")
    assert code == 0
    documented = "text token_ids finish_reason prompt_len ttft_ms tpot_ms num_draft_tokens num_accepted_tokens"
    assert set(documented.split()) <= json.loads(out).keys()
    code, out, _ = run_cli(monkeypatch, capsys, "generate", "--address", front.address, "--prompt", "x")
    assert (code, out) == (0, "abc\n")


def test_everything_a_request_may_ask_is_a_flag(front, monkeypatch, capsys):
    stats = inference_pb2.RequestStats(prompt_len=3, output_len=1)
    report = inference_pb2.TokenLogprobs(token_id=7, logprob=-0.5, rank=2, top_token_ids=[9], top_logprobs=[-0.25])
    front.chunks = [
        inference_pb2.GenerateChunk(prompt_logprobs=[report] * 2),
        *(
            inference_pb2.GenerateChunk(
                choice=choice,
                token_ids=[7],
                text="ab"[choice],
                logprobs=[report],
                finish=inference_pb2.Finish(reason="length", stats=stats),
            )
            for choice in (1, 0)
        ),
    ]
    flags = "--min-p 0.1 --min-tokens 2 --repetition-penalty 1.5 --presence-penalty 0.5 --frequency-penalty -1 --n 2"
    flags += " --logprobs 1 --prompt-logprobs 0 --logit-bias 5=1.5 --logit-bias 6=-2 --bad-words 1,2 --bad-words 3"
    flags += " --allowed-token-ids 7,8 --stop-token-ids 9"
    arguments = ["generate", "--address", front.address, "--prompt", "x", *flags.split()]
    code, out, _ = run_cli(monkeypatch, capsys, *arguments, "--json")
    assert code == 0
    sampling = wire.sampling_from_proto(front.requests[0].sampling)
    assert (sampling.min_p, sampling.min_tokens, sampling.n) == (0.1, 2, 2)
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    assert penalties == (1.5, 0.5, -1.0)
    assert (sampling.logprobs, sampling.prompt_logprobs) == (1, 0)
    assert sampling.logit_bias == ((5, 1.5), (6, -2.0))
    assert sampling.bad_words == ((1, 2), (3,))
    assert (sampling.allowed_token_ids, sampling.stop_token_ids) == ((7, 8), (9,))
    data = json.loads(out)
    assert [choice["text"] for choice in data["choices"]] == ["a", "b"]
    assert data["logprobs"] == [{"token_id": 7, "logprob": -0.5, "rank": 2, "top": [[9, -0.25]]}]
    assert len(data["prompt_logprobs"]) == 2
    code, out, err = run_cli(monkeypatch, capsys, *arguments)
    assert (code, out) == (0, "a\n--- answer 1\nb\n")
    assert "token 7: logprob -0.500, rank 2  9:-0.250" in err


def test_an_error_keeps_its_type(front):
    front.error = Overloaded("the queue is full", limit=256)
    with pytest.raises(Overloaded) as refused:
        complete_remotely(front.address, CompletionArguments(prompt="x"), lambda text: None)
    assert refused.value.fields == {"limit": 256}


def test_a_stream_that_breaks_is_partial(front, monkeypatch, capsys):
    front.chunks = finished_chunks()[:1]
    front.error = WorkerLost("decode-0 is gone")
    with pytest.raises(Interrupted) as broken:
        complete_remotely(front.address, CompletionArguments(prompt="x"), lambda text: None)
    assert (broken.value.text, broken.value.token_ids) == ("a", [7])
    code, out, err = run_cli(monkeypatch, capsys, "generate", "--address", front.address, "--prompt", "x", "--json")
    assert code == 4
    assert (json.loads(out)["text"], json.loads(out)["error"]) == ("a", "WorkerLost")
    assert "decode-0 is gone" in err


def test_status_is_a_table_or_an_object(front, monkeypatch, capsys):
    code, out, _ = run_cli(monkeypatch, capsys, "status", "--address", front.address, "--json")
    worker = json.loads(out)["workers"][0]
    assert code == 0
    assert worker["state"]["epoch"] == "8000000000000001"
    assert worker["state"]["inventory"]["num_blocks"] == 100
    front.alive = False
    code, out, _ = run_cli(monkeypatch, capsys, "status", "--address", front.address)
    assert code == 4
    assert "decode-0" in out
    assert "0/100" in out


def test_held_resources_are_counted(front):
    assert not any(admin.held_resources(admin.fetch_inventory(front.address)).values())
    front.num_blocks_free = 97
    assert admin.held_resources(admin.fetch_inventory(front.address))["blocks"] == 3


def test_nothing_at_the_address_is_a_precondition():
    with pytest.raises(StartupError, match="no deployment answers"):
        admin.fetch_status("127.0.0.1:1")


def test_a_proxy_of_the_environment_is_not_asked_for_this_host(front, monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    port = front.address.rpartition(":")[2]
    assert admin.fetch_status(front.address).workers
    assert admin.fetch_status(f"localhost:{port}").workers


def test_why_nothing_answers_is_told_where_it_is_known(tmp_path):
    def said(address):
        with pytest.raises(StartupError) as refused:
            admin.fetch_status(address)
        return refused.value.message

    assert "the name no..where does not resolve" in said("no..where:50051"), "told without asking a name server"
    assert "TLS" not in said("127.0.0.1:1")
    files = Authority(tmp_path).issue()
    credentials = grpc.ssl_server_credentials([(Path(files.key_file).read_bytes(), Path(files.cert_file).read_bytes())])
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    assert "or it speaks TLS: give --tls-ca-file" in said(f"127.0.0.1:{port}")
    server.stop(0).wait()


def test_a_port_that_speaks_http_is_named_as_such():
    """The address that `baton serve` printed for other clients."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with pytest.raises(StartupError, match="does not speak gRPC"):
                admin.fetch_status(f"127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()


def completion(**values):
    base = {"text": "", "token_ids": (1,), "finish_reason": "length", "prompt_len": 600, "seed": 0, "ttft_ms": 1.0}
    base |= {"tpot_ms": 1.0, "num_verify_steps": 1, "num_draft_tokens": 2, "num_accepted_tokens": 1}
    base |= {"kv_bytes_pushed": 100, "kv_bytes_landed_before_prefill_end": 60}
    return Completion(**(base | values))


def test_the_demo_fails_for_each_of_its_reasons():
    good = [completion(prompt_len=10), completion(prompt_len=20), completion()]
    idle = {"blocks": 0}
    assert demo._problems(good, [True] * 3, idle) == []
    assert "differ" in demo._problems(good, [True, False, True], idle)[0]
    assert "still held" in demo._problems(good, [True] * 3, {"blocks": 1})[0]
    late = [*good[:2], completion(kv_bytes_landed_before_prefill_end=59)]
    assert "59%" in demo._problems(late, [True] * 3, idle)[0]
    assert "no prompt" in demo._problems([completion(prompt_len=9)] * 3, [True] * 3, idle)[0]


@pytest.mark.parametrize(
    ("arguments", "error", "code"),
    [
        (["--prompt", "x", "--max-tokens", str(2**31)], "InvalidSampling", 2),
        (["--prompt", "x", "--top-k", str(2**40)], "InvalidSampling", 2),
        (["--prompt", "x", "--seed", str(2**63)], "InvalidSampling", 2),
        (["--prompt", "a\udcff"], "InvalidText", 2),  # what argv makes of a byte 0xff
        (["--prompt", "x", "--stop", "\udcff"], "InvalidText", 2),
        (["--prompt", "x", "--address", "\udcff:1"], "InvalidText", 2),
        (["--prompt", "-"], "EmptyPrompt", 2),
        (["--prompt", "x", "--timeout", "0"], "ConfigInvalid", 2),
        (["--prompt", "x", "--timeout", "-1"], "ConfigInvalid", 2),
        (["--prompt", "x", "--timeout", "nan"], "ConfigInvalid", 2),
        (["--prompt", "x", "--timeout", "inf"], "ConfigInvalid", 2),
        (["--prompt", "x", "--timeout", "0.05"], "RequestDeadlineExceeded", 124),
        (["--prompt", "x", "--local", "--timeout", "nan"], "ConfigInvalid", 2),
    ],
)
@pytest.mark.long
def test_what_the_command_line_may_be_given(front, monkeypatch, capsys, arguments, error, code):
    front.delay_s = 0.15
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it when the file descriptor is closed
    place = [] if {"--address", "--local"} & set(arguments) else ["--address", front.address]
    given, out, err = run_cli(monkeypatch, capsys, "generate", *place, *arguments, "--json")
    assert (given, json.loads(out)["error"]) == (code, error)
    assert "next: " in err


def test_a_number_too_wide_is_named_and_a_long_time_limit_is_cut(front, monkeypatch, capsys):
    with pytest.raises(InvalidSampling, match="top_k") as wide:
        complete_remotely(front.address, CompletionArguments(prompt="x", top_k=2**40), lambda text: None)
    assert wide.value.fields["field"] == "top_k"
    front.chunks = finished_chunks()
    arguments = ("--address", front.address, "--prompt", "x", "--timeout", "1e300")
    assert run_cli(monkeypatch, capsys, "generate", *arguments)[:2] == (0, "abc\n")


def test_an_error_of_no_type_is_one_line(front, monkeypatch, capsys):
    front.fault = "it broke"
    for command in (["generate", "--prompt", "x"], ["status"]):
        code, out, _ = run_cli(monkeypatch, capsys, *command, "--address", front.address, "--json")
        assert code == 1
        assert "it broke" in json.loads(out)["message"]
        assert "\n" not in json.loads(out)["message"]


def test_errors_of_calls_that_are_not_ours_are_kept_readable():
    assert isinstance(admin.error_from_rpc(grpc.RpcError("odd"), "here"), BatonError)
