"""Models, tokens, health and metrics over HTTP."""

import json
import re
from types import SimpleNamespace

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.core.errors import ModelFileDamaged
from baton.proto import admin_pb2, admin_pb2_grpc
from baton.router.openai.front import HttpConfig
from baton.router.openai.tokens import Tokens
from baton.router.served_model import ServedModel
from baton.tests.router.fakes import TOKENIZER
from baton.tests.router.openai.served import CHATML, MAX_MODEL_LEN, MODEL, served
from baton.tests.router.openai.test_errors import post, raw

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]


async def test_models():
    async with served() as (_, client):
        [model] = (await client.models.list()).data
        assert (model.id, model.object, model.max_model_len) == (MODEL, "model", MAX_MODEL_LEN)
        assert (await client.models.retrieve(MODEL)).id == MODEL


@pytest.mark.parametrize(("name", "code"), [("", "not_found"), ("other", "model_not_found")])
async def test_a_model_that_is_not_there(name, code):
    async with served() as (running, _):
        status, _, body = await raw(running.url, [f"GET /v1/models/{name} HTTP/1.1"])
        assert (status, json.loads(body)["error"]["code"]) == (404, code)


async def test_tokenize_and_back():
    async with served() as (running, _):
        url = running.url
        want = TOKENIZER.encode("hé")
        status, _, data = await post(url, "/tokenize", {"model": MODEL, "prompt": "hé", "return_token_strs": True})
        assert (status, data["tokens"], data["count"], data["max_model_len"]) == (200, want, 3, MAX_MODEL_LEN)
        assert data["token_strs"] == ["h", "�", "�"]
        _, _, data = await post(url, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})
        assert TOKENIZER.decode(data["tokens"]) == "<user>x\n<assistant>"
        _, _, data = await post(url, "/detokenize", {"tokens": want})
        assert data == {"prompt": "hé"}
        _, _, data = await post(url, "/detokenize", {"tokens": [*want, 256]})
        assert data == {"prompt": "hé<eos>"}
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", {"prompt": 3}),
            ("/detokenize", {"tokens": [9999]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": "a"}),
            ("/detokenize", {}),
        ):
            status, _, data = await post(url, path, body)
            assert (status, data["error"]["type"]) == (400, "invalid_request_error"), body
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
            assert (await post(url, path, body | {"model": "other"}))[0] == 404


async def test_what_is_known_of_the_tokenizer(tmp_path):
    async with served() as (running, _):
        status, _, body = await raw(running.url, ["GET /tokenizer_info HTTP/1.1"])
        assert (status, json.loads(body)) == (
            200,
            {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML},
        )
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    about = tmp_path / "tokenizer_config.json"
    about.write_text(
        '{"tokenizer_class": "Q", "eos_token": {"content": "<e>"}, "bos_token": null, "model_max_length": NaN}'
    )
    read = ServedModel.from_directory("toy", tmp_path, weights="random")
    front = SimpleNamespace(model=read, config=HttpConfig(port=0))
    known = json.loads((await Tokens(front).info(None)).body)
    assert (known["tokenizer_class"], known["eos_token"], known["chat_template"]) == ("Q", "<e>", None)
    # lm_eval's remote tokenizer begins and ends texts with these tokens. Checkpoints of some years name them only here.
    about.write_text('{"eos_token": "<e>"}')
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<b>"}, "eos_token": "<f>"}')
    read = ServedModel.from_directory("toy", tmp_path, weights="random")
    known = json.loads((await Tokens(SimpleNamespace(model=read, config=HttpConfig(port=0))).info(None)).body)
    assert (known["bos_token"], known["eos_token"]) == ("<b>", "<f>")
    about.unlink()
    assert ServedModel.from_directory("toy", tmp_path, weights="random").tokenizer_config["bos_token"] == "<b>"
    for text in ("[]", "{", "[" * 100_000):
        about.write_text(text)
        with pytest.raises(ModelFileDamaged, match="not a JSON object"):
            ServedModel.from_directory("toy", tmp_path, weights="random")


# What load generators send: `vllm bench serve` (openai, openai-chat), SGLang's bench_serving, guidellm, aiperf.
LOADS = [
    ("completions", {"prompt": "say", "max_tokens": 64, "repetition_penalty": 1.0, "logprobs": None}),
    ("completions", {"prompt": "say", "max_tokens": 64, "ignore_eos": True, "best_of": 1, "temperature": 0.0}),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "say"}]}]}),
    (
        "chat/completions",
        {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "say"}], "max_tokens": 64},
    ),
]


@pytest.mark.parametrize(("path", "body"), LOADS)
async def test_what_a_load_generator_counts_is_what_the_metrics_count(path, body):
    """Tokens by the usage, which comes alone and last; gaps by the pieces between."""
    more = {"stream": True, "stream_options": {"include_usage": True}}
    async with served() as (running, _):
        sent = {"model": MODEL, **body, **more}
        status, headers, text = await post(running.url, f"/v1/{path}", sent, "x-request-id: bench-1f-0")
        assert (status, headers["x-request-id"]) == (200, "bench-1f-0")
        *chunks, last, done = re.findall(r"data: (.+)\n\n", text.decode())
        assert done == "[DONE]"
        chunks, last = [json.loads(chunk) for chunk in chunks], json.loads(last)
        assert all(len(chunk["choices"]) == 1 and not chunk["usage"] for chunk in chunks)
        assert last["choices"] == []
        metrics = running.router.metrics
        counted = (metrics.total("prompt_tokens"), metrics.total("generation_tokens"))
        assert counted == (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"])
        pieces = [chunk["choices"][0] for chunk in chunks]
        texts = [piece["delta"]["content"] if "delta" in piece else piece["text"] for piece in pieces]
        if path == "chat/completions":
            assert (texts.pop(0), pieces[0]["delta"]["role"]) == ("", "assistant")
        assert all(texts), "a piece without text would count as a token"
        num_gaps = metrics.registry.get_sample_value("baton_inter_token_latency_seconds_count")
        assert num_gaps == len(texts) - 1


async def test_health_and_metrics():
    async with served() as (running, client):
        await client.completions.create(model=MODEL, prompt="x", max_tokens=64)
        for path in ("/health", "/ready"):
            status, _, body = await raw(running.url, [f"GET {path} HTTP/1.1"])
            assert (status, json.loads(body)["status"]) == (200, "ok" if path == "/health" else "ready")
        _, fields, body = await raw(running.url, ["GET /metrics HTTP/1.1"])
        assert fields["content-type"].startswith("text/plain")
        families = {family.name: family for family in text_string_to_metric_families(body.decode())}
        assert families["baton_generation_tokens"].samples[0].value == 11


async def test_a_router_whose_workers_are_all_drained_is_not_ready():
    async with served() as (running, _):
        assert (await raw(running.url, ["GET /ready HTTP/1.1"]))[0] == 200
        async with grpc.aio.insecure_channel(running.address) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            await admin.Drain(admin_pb2.DrainRequest(worker_id="decode-0"))
            assert (await raw(running.url, ["GET /ready HTTP/1.1"]))[0] == 503
            await admin.Drain(admin_pb2.DrainRequest(worker_id="decode-0", undo=True))
        assert (await raw(running.url, ["GET /ready HTTP/1.1"]))[0] == 200
