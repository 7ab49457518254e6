"""OpenAI's client, curl, and a gRPC client with nothing but reflection, against the tiny model.

A router process, whole workers, no Ray.
"""

import json
import shutil
import subprocess
import threading

import grpc
import jsonschema
import openai
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from baton.client import BatonClient
from baton.core.requests.sampling import SamplingParams
from baton.core.requests.tokenizer import Tokenizer
from baton.proto import inference_pb2
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.http_served import HttpServed

TOKENIZER = Tokenizer.from_directory(TINY)
HI = [{"role": "user", "content": "def main(argv=None):"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/Node"}},
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"leaf": {"type": "boolean"}, "kind": {"$ref": "#/$defs/Kind"}},
            "required": ["leaf", "kind"],
            "additionalProperties": False,
        },
        "Kind": {"enum": ["oak", "elm"]},
    },
}
PARAMETERS = {"weather": WEATHER, "tree": TREE}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in PARAMETERS.items()]


@pytest.fixture(scope="module")
def served():
    running = HttpServed()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def nothing_is_left(served):
    yield
    served.wait(served.is_idle)


@pytest.fixture(scope="module")
def compact(served):
    """A bias against tokens with white space around punctuation: the tiny model would rather indent for ever."""
    reply = served.client.post("/../tokenize", body={"prompt": "x"}, cast_to=object)
    assert reply["count"] == 1
    texts = {token_id: TOKENIZER.token_bytes(token_id) for token_id in range(TOKENIZER.vocab_size)}
    white = [token_id for token_id, text in texts.items() if text != text.strip() and not text.strip().isalnum()]
    assert len(white) <= 1024
    return {str(token_id): -100 for token_id in white}


def chat(served, **more):
    return served.client.chat.completions.create(model="tiny", messages=HI, **({"max_tokens": 16, "seed": 5} | more))


def text_of(answer):
    return answer.choices[0].message.content


def test_a_chat_is_what_grpc_gives_for_the_same_prompt(served):
    prompt = f"<|im_start|>user\n{HI[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    with BatonClient(served.address) as client:
        for temperature in (0.0, 1.0):
            want = client.generate_text(prompt, sampling=SamplingParams(max_tokens=16, seed=5, temperature=temperature))
            answer = chat(served, temperature=temperature)
            assert text_of(answer) == want
            assert answer.choices[0].finish_reason == "length"
            chunks = list(chat(served, temperature=temperature, stream=True, stream_options={"include_usage": True}))
            assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == want
            assert chunks[-1].usage.model_dump() | {"prompt_tokens_details": None} == answer.usage.model_dump() | {
                "prompt_tokens_details": None
            }
            assert answer.usage.completion_tokens == 16
        [token_ids] = [client.tokenize(prompt)]
    assert answer.usage.prompt_tokens == len(token_ids)
    assert len(token_ids) < len(prompt) / 2, "special tokens of the template are tokens"


def test_equal_seeds_give_equal_answers_and_others_do_not(served):
    first, again, other = (text_of(chat(served, seed=seed, max_tokens=32)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_two_answers_differ(served):
    answer = chat(served, n=2, max_tokens=32)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.completion_tokens == 64
    texts = ["", ""]
    for chunk in chat(served, n=2, max_tokens=32, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


def test_a_stop_string(served):
    whole = text_of(chat(served, temperature=0.0, max_tokens=32))
    stop = whole[10:13]
    answer = chat(served, temperature=0.0, max_tokens=32, stop=stop)
    assert (text_of(answer), answer.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")


def test_log_probabilities(served):
    answer = chat(served, logprobs=True, top_logprobs=3, temperature=0.0)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 16
    assert b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace") == text_of(answer)
    for entry in entries:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy takes the likeliest"
    prompt = "import os\n\n\ndef f("
    echo = served.client.completions.create(model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=2, seed=1)
    [choice] = echo.choices
    assert choice.text.startswith(prompt)
    assert "".join(choice.logprobs.tokens) == choice.text
    places = zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
    assert all(choice.text[at:].startswith(token) for at, token in places)
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])


def test_a_json_schema(served, compact):
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    for seed in range(3):
        answer = chat(served, seed=seed, response_format=form, max_tokens=120, logit_bias=compact)
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(text_of(answer)), WEATHER)
    word = chat(served, extra_body={"guided_choice": ["yes", "no.", "a|b"]})
    assert text_of(word) in ("yes", "no.", "a|b")


NAMED_TOOL = {"type": "function", "function": {"name": "tree"}}


@pytest.mark.parametrize("choice", [pytest.param("required", marks=pytest.mark.slow), NAMED_TOOL])
def test_a_forced_call_is_valid_even_from_a_tiny_model(served, compact, choice):
    more = {"tools": TOOLS, "tool_choice": choice, "logit_bias": compact, "max_tokens": 400}
    names = set()
    for seed in range(4):
        answer = chat(served, seed=seed, parallel_tool_calls=False, **more).choices[0]
        [call] = answer.message.tool_calls
        assert answer.message.content is None
        assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
        names.add(call.function.name)
        name = arguments = ""
        for chunk in chat(served, seed=seed, parallel_tool_calls=False, stream=True, **more):
            for part in chunk.choices[0].delta.tool_calls or ():
                name, arguments = name + (part.function.name or ""), arguments + (part.function.arguments or "")
        assert (name, arguments) == (call.function.name, call.function.arguments)
    assert names <= set(PARAMETERS)
    if choice != "required":
        assert names == {"tree"}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_or_a_text_of_the_schema(served, compact, stream):
    """Whatever a tiny model writes: calls with arguments of the schema, or JSON of the format."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    tools = [one | {"function": one["function"] | {"strict": True}} for one in TOOLS]
    more = {"tools": tools, "response_format": form, "max_tokens": 400, "parallel_tool_calls": False}
    more["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    tag = {str(token): 8.0 for token in TOKENIZER.encode("<tool_call>")[:1]}
    kinds = set()
    for seed in range(6):
        biases = compact | (tag if seed % 2 else {})
        content, calls = "", {}
        if stream:
            for chunk in chat(served, seed=seed, stream=True, logit_bias=biases, **more):
                [choice] = chunk.choices
                content += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    call = calls.setdefault(part.index, ["", ""])
                    call[0] += part.function.name or ""
                    call[1] += part.function.arguments or ""
                reason = choice.finish_reason
        else:
            [choice] = chat(served, seed=seed, logit_bias=biases, **more).choices
            content, reason = choice.message.content or "", choice.finish_reason
            for at, one in enumerate(choice.message.tool_calls or ()):
                calls[at] = [one.function.name, one.function.arguments]
        assert reason == ("tool_calls" if calls else "stop"), (seed, content, calls)
        assert bool(content) != bool(calls)
        kinds.add("calls" if calls else "text")
        for name, arguments in calls.values():
            jsonschema.validate(json.loads(arguments), PARAMETERS[name])
        if content:
            jsonschema.validate(json.loads(content), WEATHER)
    assert kinds == {"calls", "text"}


def test_a_thought_is_free_and_what_follows_is_not(served, compact):
    """A prompt that ends in a thought: a bias towards the closing tag ends it somewhere, and then there is JSON."""
    messages = [*HI, {"role": "assistant", "content": "<think>"}]
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    body = {"continue_final_message": True, "add_generation_prompt": False}
    tags = {str(token): 6.0 for token in TOKENIZER.encode("</think>")}
    ended = 0
    for seed in range(4):
        answer = served.client.chat.completions.create(
            model="tiny", messages=messages, seed=seed, response_format=form, max_tokens=400,
            logit_bias=compact | tags, extra_body=body,
        )  # fmt: skip
        [choice] = answer.choices
        if choice.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(choice.message.content), WEATHER)
    assert ended


def test_what_is_refused(served):
    for more, match in (
        ({"max_tokens": 5000}, r"maximum context length is \d+ tokens"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
            "schema",
        ),
        ({"extra_body": {"guided_regex": "("}}, "regex"),
    ):
        with pytest.raises(openai.BadRequestError, match=match):
            chat(served, **more)
    with pytest.raises(openai.NotFoundError):
        served.client.chat.completions.create(model="large", messages=HI)


def test_a_client_that_leaves_gives_everything_back(served):
    stream = chat(served, stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    iterator = iter(stream)
    for _ in range(3):
        next(iterator)
    assert not served.is_idle()
    stream.close()
    served.wait(served.is_idle, 1.0)


def test_many_clients_at_once(served):
    texts = {}

    def ask(seed):
        texts[seed] = text_of(chat(served, seed=seed % 3, max_tokens=24))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 9
    assert all(texts[seed] == texts[seed % 3] for seed in texts)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(served, compact):
    def curl(path, data=None):
        command = ["curl", "-sS", "-N", "--max-time", "60", f"{served.url}{path}"]
        if data is not None:
            command += ["-H", "Content-Type: application/json", "--data-binary", "@-"]
        done = subprocess.run(command, input=json.dumps(data).encode(), capture_output=True, timeout=90, check=True)
        return done.stdout.decode()

    assert json.loads(curl("/v1/models"))["data"][0]["id"] == "tiny"
    assert "baton_num_streams_open" in curl("/metrics")
    body = {"model": "tiny", "messages": HI, "max_tokens": 8, "seed": 1, "logprobs": True, "top_logprobs": 1}
    whole = json.loads(curl("/v1/chat/completions", body))["choices"][0]
    assert len(whole["logprobs"]["content"]) == 8
    events = curl("/v1/chat/completions", body | {"stream": True}).strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["message"]["content"]
    more = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "logit_bias": compact}
    called = json.loads(curl("/v1/chat/completions", body | more | {"max_tokens": 200}))["choices"][0]["message"]
    jsonschema.validate(json.loads(called["tool_calls"][0]["function"]["arguments"]), WEATHER)
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    formed = curl("/v1/chat/completions", body | {"response_format": form, "logit_bias": compact, "max_tokens": 200})
    jsonschema.validate(json.loads(json.loads(formed)["choices"][0]["message"]["content"]), WEATHER)
    assert json.loads(curl("/v1/chat/completions", body | {"model": "no"}))["error"]["code"] == "model_not_found"


class Reflected:
    """A client that has no file of ours: it asks the server what there is."""

    def __init__(self, channel):
        self.channel = channel
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "baton.v1.Inference" in database.get_services()
        self.methods = descriptor_pool.DescriptorPool(database).FindServiceByName("baton.v1.Inference").methods_by_name

    def call(self, name, **fields):
        """All replies to one request."""
        method = self.methods[name]
        path = f"/{method.containing_service.full_name}/{name}"
        request, reply = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
        assert request is not inference_pb2.GenerateRequest
        codecs = {"request_serializer": request.SerializeToString, "response_deserializer": reply.FromString}
        if method.server_streaming:
            return list(self.channel.unary_stream(path, **codecs)(request(**fields), timeout=60))
        return [self.channel.unary_unary(path, **codecs)(request(**fields), timeout=60)]


def test_a_client_that_knows_only_reflection(served, compact):
    prompt = f"<|im_start|>user\n{HI[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    biases = [{"token_id": int(token), "bias": bias} for token, bias in compact.items()]
    with grpc.insecure_channel(served.address) as channel:
        client = Reflected(channel)
        [model] = client.call("GetModel")
        assert model.name == "tiny"
        [tokens] = client.call("Tokenize", text=prompt)
        sampling = {"max_tokens": 16, "seed": 5}
        chunks = client.call("Generate", text=prompt, sampling=sampling)
        assert "".join(chunk.text for chunk in chunks) == text_of(chat(served))
        assert not any(chunk.HasField("finish") for chunk in chunks[:-1])
        assert len(client.call("Generate", text=prompt, sampling={"max_tokens": 64, "seed": 5, "ignore_eos": True})) > 2
        assert chunks[-1].finish.stats.prompt_len == len(tokens.token_ids)
        assert [chunk.index for chunk in chunks[1:]] == [
            sum(len(chunk.token_ids) for chunk in chunks[:at]) for at in range(1, len(chunks))
        ]
        reported = client.call("Generate", text=prompt, sampling=sampling | {"logprobs": 2})
        reports = [report for chunk in reported for report in chunk.logprobs]
        entries = chat(served, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert [report.logprob for report in reports] == [entry.logprob for entry in entries]
        assert all(len(report.top_token_ids) == 2 for report in reports)
        form = {"json_schema": json.dumps(WEATHER)}
        limits = {"max_tokens": 120, "seed": 1, "logit_bias": biases, "grammar": form}
        formed = client.call("Generate", text=prompt, sampling=limits)
        assert formed[-1].finish.reason == "stop"
        jsonschema.validate(json.loads("".join(chunk.text for chunk in formed)), WEATHER)
        with pytest.raises(grpc.RpcError) as refused:
            client.call("Generate", text=prompt, model="other")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
