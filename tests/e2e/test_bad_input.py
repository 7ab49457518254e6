"""Bad input at every door of a served model: a typed refusal, at once, with nothing held and nothing broken after.

What `tests/router` and `tests/cluster` check against stand-ins is not repeated; here the workers are real, so a refusal
can be seen to hold nothing and the next good request to give the same tokens.
"""

import json
import math
import shutil
import sys
import threading
import time
import types

import grpc
import pytest

from baton.client import BatonClient
from baton.cluster import cli
from baton.cluster.deployment import Deployment
from baton.core.config import ServeConfig
from baton.core.errors import (
    BatonError,
    ConflictingOptions,
    EmptyPrompt,
    InvalidGrammar,
    InvalidRequest,
    InvalidSampling,
    InvalidText,
    MalformedMessage,
    ModelNotFound,
    PromptTooLong,
)
from baton.core.requests.sampling import GrammarSpec, SamplingParams
from baton.proto import inference_pb2, wire, worker_pb2
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.test_deployment import wait_idle
from baton.tests.inside import met
from baton.tests.worker.streams import ATTEND_ALL, RUN_ALL, opening, raw_end

PROMPT = "def f(x):"
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
REFUSAL_S = 5.0
RELEASE_S = 4.0
GENERATE, TOKENIZE = "/baton.v1.Inference/Generate", "/baton.v1.Inference/Tokenize"


@pytest.fixture(scope="module")
def deployment():
    # One MiB holds 9 blocks of 16 positions: a whole pool is shorter than the model.
    # On a machine that is busy with other things nobody is to be refused for that.
    config = {"dtype": "float32", "kv_memory_mib": 1, "grpc_port": 0, "max_wait_s": 120.0}
    with Deployment(ServeConfig.from_mapping(config)) as running:
        yield running


@pytest.fixture(scope="module")
def client(deployment):
    with BatonClient(deployment.address, timeout_s=120.0) as client:
        yield client


@pytest.fixture(scope="module")
def good(client):
    return client.generate_text(PROMPT, sampling=GREEDY)


@pytest.fixture
def nothing_else(client, good):
    """Nothing is held before, nothing after, no worker has died, and a good request gives what it gave."""
    wait_idle(client, RELEASE_S)
    before = {worker.state.worker_id: worker.state for worker in client.inventory().workers}
    yield
    for worker in client.inventory().workers:  # at once: a refusal has nothing to give back
        old, new = before[worker.state.worker_id], worker.state
        assert worker.alive
        assert (new.epoch, new.inventory.num_requests_held) == (old.epoch, 0)
        assert new.inventory.num_blocks_free == new.inventory.num_blocks
        if new.role == "prefill":  # decode counts a request that ended at its first token as failed
            assert new.inventory.num_requests_failed == old.inventory.num_requests_failed, "it reached a worker"
    assert client.generate_text(PROMPT, sampling=GREEDY) == good


def capacity_len(client):
    inventories = [
        (worker.state.inventory.num_blocks, worker.state.block_size) for worker in client.inventory().workers
    ]
    return min(num_blocks * block_size for num_blocks, block_size in inventories)


def refused(kind, call):
    """The error `call` raises: exactly this kind, soon."""
    start_s = time.monotonic()
    with pytest.raises(BatonError) as caught:
        call()
    assert type(caught.value) is kind, caught.value
    assert caught.value.message
    assert time.monotonic() - start_s < REFUSAL_S
    return caught.value


def raw(channel, method, data):
    """One RPC of plain bytes; (code, error, whether the error came typed in the trailing metadata)."""
    with pytest.raises(grpc.RpcError) as caught:
        if method == TOKENIZE:
            channel.unary_unary(method)(data, timeout=REFUSAL_S)
        else:
            list(channel.unary_stream(method)(data, timeout=REFUSAL_S))
    keys = [key for key, _ in caught.value.trailing_metadata() or ()]
    return caught.value.code(), wire.error_from_rpc(caught.value), wire.ERROR_KEY in keys


@pytest.mark.ray
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"prompt": ""}, EmptyPrompt),
        ({}, EmptyPrompt),
        ({"token_ids": []}, EmptyPrompt),
        ({"prompt": "a", "token_ids": [1]}, ConflictingOptions),
        ({"prompt": "a\udcff"}, InvalidText),
        ({"prompt": "a", "model": "other"}, ModelNotFound),
        ({"token_ids": [1, 4096]}, InvalidRequest),
        ({"token_ids": [2**32 - 1]}, InvalidRequest),
        ({"token_ids": [2**32]}, InvalidRequest),
        ({"token_ids": [300] * 2048}, PromptTooLong),
        ({"token_ids": [300] * 1_000_000}, PromptTooLong),
        ({"prompt": "a", "model": "\ud800"}, InvalidText),
    ],
)
def test_prompts(client, nothing_else, values, kind):
    refused(kind, lambda: client.generate_text(**values))


@pytest.mark.ray
def test_lengths_against_the_whole_pool(client, nothing_else):
    capacity = capacity_len(client)
    num_drafts = client.model().num_draft_tokens
    assert client.model().max_model_len == capacity - num_drafts < 2048, "no more than the pool holds"

    def generate(prompt_len, max_tokens):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return client.generate_text(token_ids=[300] * prompt_len, sampling=sampling)

    for lens in [(capacity + 1, 1), (capacity, 1), (capacity - num_drafts - 1, 2), (10, capacity), (1, 2**31 - 1)]:
        assert refused(PromptTooLong, lambda lens=lens: generate(*lens)).fields["limit"] in (
            capacity - num_drafts - 1,  # of the prompt
            capacity - num_drafts,  # of prompt and answer
        )
    assert generate(capacity - num_drafts - 1, 1) is not None
    wait_idle(client, RELEASE_S)


@pytest.mark.ray
def test_sampling(client, nothing_else):
    bad = [{"max_tokens": value} for value in (0, -1, -(2**31), 2**31, 2**63, 10**30)]
    bad += [{"temperature": value} for value in (math.nan, math.inf, -math.inf, -0.1, 100.1)]
    bad += [{"top_p": value} for value in (math.nan, math.inf, -1.0, 0.0, 1.0000001)]
    bad += [{"top_k": value} for value in (-1, 2**31)]
    bad += [{"seed": value} for value in (-1, 2**63, -(2**63))]
    bad += [{"stop": value} for value in (("",), ("x",) * 1000, ("x" * 257,))]
    bad += [{"stop_token_ids": value} for value in ((4096,), (-1,), (1,) * 1000)]
    bad += [{"min_p": value} for value in (math.nan, -0.1, 1.1)]
    bad += [{"repetition_penalty": value} for value in (math.nan, math.inf, 0.0, -1.0)]
    bad += [{name: value} for name in ("presence_penalty", "frequency_penalty") for value in (math.nan, -2.1, 2.1)]
    bad += [{"logit_bias": value} for value in (((4096, 1.0),), ((1, math.nan),), ((1, 101.0),), ((-1, 1.0),))]
    bad += [{"bad_words": value} for value in (((),), ((4096,),), ((1,) * 33,), ((1,),) * 129)]
    bad += [{"allowed_token_ids": value} for value in ((), (4096,), (2**32,))]
    bad += [{"min_tokens": value} for value in (-1, 129, 2**31)]
    bad += [{"logprobs": value} for value in (-1, 21)] + [{"prompt_logprobs": 2**31}]
    bad += [{"n": value} for value in (0, -1, 17, 2**31 - 1)]
    bad += [{"grammar": GrammarSpec("regex", "a"), "ignore_eos": True}]
    for values in bad:
        refused(InvalidSampling, lambda values=values: client.generate_text("a", sampling=SamplingParams(**values)))
    for spec in (GrammarSpec("regex", "(a"), GrammarSpec("json_schema", "{"), GrammarSpec("yaml", "a: 1")):
        refused(InvalidGrammar, lambda spec=spec: client.generate_text("a", sampling=SamplingParams(grammar=spec)))


@pytest.mark.ray
def test_edge_values_are_served(client, nothing_else):
    edges = [
        {"temperature": -0.0},
        {"temperature": 1e-320},
        {"top_p": 5e-324},
        {"top_k": 2**31 - 1},
        {"seed": 2**63 - 1},
        {"min_p": 1.0},
        {"repetition_penalty": 0.01, "presence_penalty": -2.0, "frequency_penalty": -2.0},
        {"logit_bias": ((1, 100.0), (2, -100.0)), "repetition_penalty": 100.0},
        {"allowed_token_ids": (7,), "bad_words": ((7,),)},
        {"logprobs": 20, "prompt_logprobs": 20},
    ]
    for values in edges:
        sampling = SamplingParams(**({"max_tokens": 2, "temperature": 1.0, "ignore_eos": True} | values))
        assert len([t for chunk in client.generate("a", sampling=sampling) for t in chunk.token_ids]) == 2
    wait_idle(client, RELEASE_S)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("method", "data", "kind"),
    [
        (GENERATE, b"", EmptyPrompt),
        (GENERATE, b"\x1a\x00", EmptyPrompt),  # token_ids = {}
        (GENERATE, b"\x10\x05", EmptyPrompt),  # `text` as a varint is an unknown field
        (GENERATE, b"\x12\x50abc", MalformedMessage),  # truncated
        (GENERATE, bytes(range(256)), MalformedMessage),
        (GENERATE, b"\x7b" * 5000, MalformedMessage),  # nested groups
        (GENERATE, b"\x12\x03\xed\xa0\x80", InvalidText),  # a surrogate as UTF-8
        (GENERATE, b"\x0a\x01\xff\x12\x01a", InvalidText),  # model
        (GENERATE, b"\x12\x01a\x2a\x01\xff", InvalidText),  # request_id
        (GENERATE, b"\x12\x01a\x22\x0b\x08" + b"\xff" * 9 + b"\x01", InvalidSampling),  # max_tokens = -1
        (GENERATE, b"\x12\x01a\x22\x09\x11\x00\x00\x00\x00\x00\x00\xf8\x7f", InvalidSampling),  # temperature = nan
        (GENERATE, b"\x12\x01a\x2a\x02a\x0a", InvalidRequest),  # a request_id that would begin a line of a log
        (TOKENIZE, b"\x12\x01\xff", InvalidText),
        (TOKENIZE, b"\xff" * 10, MalformedMessage),
    ],
)
def test_hand_made_bytes(deployment, nothing_else, method, data, kind):
    with grpc.insecure_channel(deployment.address) as channel:
        code, error, typed = raw(channel, method, data)
    assert (type(error), typed, code.name) == (kind, True, kind.grpc_code)


@pytest.mark.ray
def test_one_request_id_for_several_requests_at_once(deployment, client, nothing_else):
    sampling = wire.sampling_to_proto(SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    request = inference_pb2.GenerateRequest(text=PROMPT, request_id="twice ../%00\\n \u00e9", sampling=sampling)
    answers = []
    with grpc.insecure_channel(deployment.address) as channel:

        def ask():
            chunks = list(channel.unary_stream(GENERATE)(request.SerializeToString(), timeout=120.0))
            answers.append([inference_pb2.GenerateChunk.FromString(chunk) for chunk in chunks])

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == 3
    assert {chunk.request_id for chunks in answers for chunk in chunks} == {request.request_id}
    assert len({tuple(token for chunk in chunks for token in chunk.token_ids) for chunks in answers}) == 1
    wait_idle(client, RELEASE_S)


def run_cli(monkeypatch, capsys, *arguments):
    """(exit code, the JSON object) of a command run in this process."""
    monkeypatch.setattr(sys, "argv", ["baton", *arguments, "--json"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    return exit.value.code, json.loads(capsys.readouterr().out)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--prompt", ""], "EmptyPrompt"),
        (["--prompt", "x", "--max-tokens", "0"], "InvalidSampling"),
        (["--prompt", "x", "--max-tokens", "2048"], "PromptTooLong"),
        (["--prompt", "x", "--temperature", "nan"], "InvalidSampling"),
        (["--prompt", "x", "--top-p", "inf"], "InvalidSampling"),
        (["--prompt", "x", "--seed", "-1"], "InvalidSampling"),
        (["--prompt", "x", "--stop", ""], "InvalidSampling"),
        (["--prompt", "x", "--max-tokens", str(2**31)], "InvalidSampling"),
        (["--prompt", "x", "--top-k", str(10**30)], "InvalidSampling"),
        (["--prompt", "x", "--seed", str(2**63)], "InvalidSampling"),
        (["--prompt", "a\udcff"], "InvalidText"),  # what argv makes of a byte 0xff
        (["--prompt", "a", "--stop", "\udcff"], "InvalidText"),
        (["--prompt", "a", "--timeout", "nan"], "ConfigInvalid"),
        (["--prompt", "a", "--timeout", "-1"], "ConfigInvalid"),
    ],
)
def test_what_the_command_line_is_given(deployment, nothing_else, monkeypatch, capsys, arguments, error):
    code, data = run_cli(monkeypatch, capsys, "generate", "--address", deployment.address, *arguments)
    assert (code, data["error"]) == (2, error)
    assert data["next"]


@pytest.mark.ray
@pytest.mark.parametrize(("worker_id", "method"), [("prefill-0", RUN_ALL), ("decode-0", ATTEND_ALL)])
@pytest.mark.parametrize(
    "data",
    [b"\xff" * 50, b"\x0a\x50abc", opening(b"\xff" * 50), opening(b"\x0a\x50abc")],
    ids=["garbage", "truncated", "garbage in a request", "a truncated request"],
)
def test_hand_made_bytes_at_a_workers_own_port(deployment, nothing_else, worker_id, method, data):
    with grpc.insecure_channel(deployment.workers[worker_id]["address"]) as channel:
        call, _ = raw_end(met(channel, deployment.secret), method, data, REFUSAL_S)
    assert type(wire.error_from_rpc(call)) is MalformedMessage
    assert wire.ERROR_KEY in dict(call.trailing_metadata())
    assert call.code().name == "INVALID_ARGUMENT"


@pytest.mark.ray
def test_a_text_far_too_long_is_refused_at_once(client, nothing_else):
    error = refused(PromptTooLong, lambda: client.generate_text("def f(x): " * 150_000))
    assert error.fields["num_bytes"] > 1_500_000, "by its bytes: nobody tokenized it"


@pytest.mark.ray
def test_values_out_of_range_at_a_workers_own_port_do_not_end_it(deployment, client):
    """The worker checks them itself: whoever can reach its port is not always the router."""
    decode = deployment.workers["decode-0"]
    request = worker_pb2.PrefillRequest(
        attempt={"request_id": "bad", "attempt": 1},
        prompt_token_ids=[4096],
        sampling={"max_tokens": 4, "temperature": 0.0},
        decode={key: decode[key] for key in ("worker_id", "kv_address", "epoch")},
        timeout_ms=500,
    )
    with grpc.insecure_channel(deployment.workers["prefill-0"]["address"]) as channel:
        call, error = raw_end(met(channel, deployment.secret), RUN_ALL, opening(request.SerializeToString()), REFUSAL_S)
    assert call is None, "its stream alone ends"
    assert type(error) is InvalidRequest
    assert client.status().workers[1].num_epochs == 1


def damaged(path, *, file="config.json", change):
    """The bundled model with one file changed; the others are links."""
    path.mkdir()
    for source in TINY.iterdir():
        if source.name != file:
            (path / source.name).symlink_to(source)
    shutil.copy(TINY / file, path / file)
    (path / file).write_bytes(change((path / file).read_bytes()))
    return path


def with_value(**values):
    return lambda data: json.dumps(json.loads(data) | values).encode()


@pytest.mark.parametrize(
    ("file", "change", "error"),
    [
        ("model.safetensors", lambda data: data[:-1], "ModelFileDamaged"),
        ("model.safetensors", lambda data: b"", "ModelFileDamaged"),
        ("tokenizer.json", lambda data: data[:5000], "ModelFileDamaged"),
        ("config.json", lambda data: data[:50], "ModelFileDamaged"),
        ("config.json", with_value(hidden_size="big"), "ModelFileDamaged"),
        ("config.json", with_value(vocab_size=100), "ModelTensorMisshapen"),
        ("config.json", with_value(num_hidden_layers=4), "ModelTensorUnexpected"),
        ("config.json", with_value(num_hidden_layers=6), "ModelTensorMissing"),
        ("config.json", with_value(architectures=["GPT2LMHeadModel"]), "ModelUnsupported"),
        ("config.json", lambda data: b"[" * 10**5, "ModelFileDamaged"),
    ],
)
def test_model_directories_through_the_command_line(monkeypatch, capsys, tmp_path, file, change, error):
    path = damaged(tmp_path / "model", file=file, change=change)
    code, data = run_cli(monkeypatch, capsys, "generate", "--local", "--model", str(path), "--prompt", "x")
    assert (code, data["error"]) == (3, error)
    assert str(path) in data["message"] or error.startswith("ModelTensor") or path.name in data["message"]


@pytest.mark.parametrize(
    ("module", "error"),
    [(None, "RayUnavailable"), (types.SimpleNamespace(__version__="2.9.0"), "RayVersionMismatch")],
)
def test_serve_without_ray_or_with_another(monkeypatch, capsys, module, error):
    monkeypatch.setitem(sys.modules, "ray", module)
    code, data = run_cli(monkeypatch, capsys, "serve", "--grpc-port", "0")
    assert (code, data["error"]) == (3, error)
    assert "ray" in data["message"]


@pytest.mark.fast
@pytest.mark.parametrize(
    "text",
    [
        "prefill: [1]",
        "prefill: many",
        "prefill: 1.5",
        "decode: null",
        "host: 5",
        "5: 3",
        "- a",
        "{a: ",
        "!!python/object:os.system x",
        "kv_memory_mib: -1",
        "start_timeout_s: .nan",
        'mtp: "²"',
    ],
    ids=range(12),
)
@pytest.mark.long
def test_configuration_files(monkeypatch, capsys, tmp_path, text):
    path = tmp_path / "serve.yaml"
    path.write_text(f"{text}\n", encoding="utf-8")
    code, data = run_cli(monkeypatch, capsys, "serve", "--config", str(path), "--model", "/nowhere")
    assert (code, data["error"]) == (2, "ConfigInvalid")
