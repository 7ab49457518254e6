"""Drives a running server with one client library or tool: `python clients.py URL CLIENT [TOKENIZER]`.

One line for each call: its name and `works`, or what went wrong. Each client is installed by hand into an environment
of its own. Answers are judged by their form alone, since the bundled model knows nothing. TOKENIZER is the directory
whose tokenizer load generators and lm_eval count with. What load generators count must be what the server counted.
"""

import asyncio
import importlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Literal

KEY = "unused"
MODEL = "tiny"
USER = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
FORCED = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "report", "strict": True, "schema": SCHEMA}}


def expect(truth, what):
    if not truth:
        raise AssertionError(what)


def fits(text):
    value = json.loads(text)
    expect(value["city"] in ("Rome", "Oslo") and isinstance(value["warm"], bool), text)


def calls(text):
    expect(json.loads(text)["city"] in ("Rome", "Oslo"), text)


def raises(kinds, function, *arguments, text="", **options):
    try:
        function(*arguments, **options)
    except kinds as error:
        expect(text in str(error), error)
        return
    raise AssertionError("no error was raised")


def report_model():
    import pydantic

    class Report(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")  # else the model may write any others until it is cut
        city: Literal["Rome", "Oslo"]
        warm: bool

    return Report


def openai_python(url):
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)
    chats, texts = client.chat.completions, client.completions
    report = report_model()

    def chat(**options):
        return chats.create(model=MODEL, messages=USER, **{"max_tokens": 60, **options})

    def stream():
        chunks = list(chat(stream=True, max_tokens=8, stream_options={"include_usage": True}))
        expect(chunks[-1].usage.completion_tokens > 0 and chunks[-2].choices[0].finish_reason, chunks[-2:])

    def completion_stream():
        chunks = list(texts.create(model=MODEL, prompt="def f(", max_tokens=8, stream=True))
        expect(chunks[-1].choices[0].finish_reason, chunks[-1])

    def tool_stream():
        with chats.stream(model=MODEL, messages=USER, tools=[WEATHER], tool_choice="required", max_tokens=60) as events:
            calls(events.get_final_completion().choices[0].message.tool_calls[0].function.arguments)

    def schema_stream():
        with chats.stream(model=MODEL, messages=USER, response_format=report, max_tokens=60) as events:
            expect(events.get_final_completion().choices[0].message.parsed.city, "no parsed message")

    def later():
        call = chat(tools=[WEATHER], tool_choice=FORCED).choices[0].message
        back = [*USER, call, {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "20 C"}]
        expect(chats.create(model=MODEL, messages=back, tools=[WEATHER], max_tokens=8).choices, "no answer")

    def logprobs():
        tokens = chat(logprobs=True, top_logprobs=3, max_tokens=4).choices[0].logprobs.content
        expect(len(tokens) == 4 and len(tokens[0].top_logprobs) == 3, tokens)

    def completion_logprobs():
        found = texts.create(model=MODEL, prompt="def f(", max_tokens=4, logprobs=2, echo=True).choices[0].logprobs
        expect(found.token_logprobs[0] is None and len(found.tokens) > 4, found)

    def respond(**options):
        return client.responses.create(model=MODEL, input="Hello", reasoning={"effort": "none"}, **options)

    def response_stream():
        with client.responses.stream(model=MODEL, input="Hello", max_output_tokens=8) as events:
            expect([event.type for event in events][-1] in ("response.completed", "response.incomplete"), "no end")

    return "openai", {
        "models": lambda: expect(client.models.list().data[0].id == client.models.retrieve(MODEL).id, "another model"),
        "completion": lambda: expect(
            len(texts.create(model=MODEL, prompt=["a", "b"], max_tokens=4, n=2).choices) == 4, "not four"
        ),
        "completion stream": completion_stream,
        "completion logprobs with echo": completion_logprobs,
        "chat": lambda: expect(chat(n=2, seed=1, max_tokens=8).usage.prompt_tokens, "no usage"),
        "chat stream with usage": stream,
        "chat logprobs": logprobs,
        "tools, forced": lambda: calls(
            chat(tools=[WEATHER], tool_choice=FORCED).choices[0].message.tool_calls[0].function.arguments
        ),
        "tools, auto": lambda: expect(chat(tools=[WEATHER], max_tokens=8).choices, "no answer"),
        "tools, stream helper": tool_stream,
        "tools, result sent back": later,
        "JSON schema": lambda: fits(chat(response_format=FORMAT).choices[0].message.content),
        "JSON schema, parse": lambda: expect(
            chats.parse(model=MODEL, messages=USER, response_format=report, max_tokens=60)
            .choices[0]
            .message.parsed.city,
            "no parsed message",
        ),
        "JSON schema, stream helper": schema_stream,
        "error 400": lambda: raises(openai.BadRequestError, chat, temperature=-1),
        "error 404": lambda: raises(openai.NotFoundError, chats.create, model="no such", messages=USER),
        "error in a stream": lambda: raises(openai.BadRequestError, chat, stream=True, max_tokens=10**6),
        "responses": lambda: expect(respond(max_output_tokens=8).usage.output_tokens == 8, "no usage"),
        "responses, stream helper": response_stream,
        "responses, parse": lambda: expect(
            client.responses.parse(
                model=MODEL, input="Hello", text_format=report, reasoning={"effort": "none"}
            ).output_parsed.city,
            "none",
        ),
        "responses, tools forced": lambda: calls(
            respond(
                tools=[{"type": "function", **WEATHER["function"]}], tool_choice="required", parallel_tool_calls=False
            )
            .output[-1]
            .arguments
        ),
        "embeddings": lambda: client.embeddings.create(model=MODEL, input="Hello"),
    }


def anthropic_python(url):
    library = importlib.import_module("anthropic")
    client = library.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    tools = [{"name": "weather", "input_schema": WEATHER["function"]["parameters"]}]
    forced = {"type": "any", "disable_parallel_tool_use": True}

    def ask(**options):
        return client.messages.create(**{"model": MODEL, "messages": USER, "max_tokens": 60} | options)

    def stream():
        with client.messages.stream(model=MODEL, messages=USER, max_tokens=8) as events:
            expect("".join(events.text_stream) == events.get_final_text(), "another text")

    def later():
        call = ask(tools=tools, tool_choice=forced).content[-1]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "20 C"}
        back = [*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        expect(ask(messages=back, tools=tools, max_tokens=8).usage.output_tokens, "no answer")

    def loop():
        @library.beta_tool
        def weather(city: Literal["Rome", "Oslo"]) -> str:
            """Tell the weather of a city."""
            return f"20 C in {city}"

        options = {"model": MODEL, "messages": USER, "max_tokens": 100, "tool_choice": forced, "max_iterations": 2}
        reasons = [turn.stop_reason for turn in client.beta.messages.tool_runner(tools=[weather], **options)]
        expect(reasons == ["tool_use", "tool_use"], reasons)

    count = client.messages.count_tokens
    return "anthropic", {
        "messages": lambda: expect(ask(max_tokens=8).stop_reason == "max_tokens", "another reason"),
        "stream helper": stream,
        "tools, forced": lambda: expect(ask(tools=tools, tool_choice=forced).content[-1].input["city"], "none"),
        "tools, result sent back": later,
        "tools, tool_runner": loop,
        "JSON schema": lambda: fits(
            ask(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}).content[-1].text
        ),
        "count_tokens": lambda: expect(count(model=MODEL, messages=USER).input_tokens > 0, "none"),
        "error 400": lambda: raises(library.BadRequestError, ask, extra_body={"temperature": -1}),
        "error 404": lambda: raises(library.NotFoundError, ask, model="no such"),
    }


def langchain(url):
    import langchain_openai
    import openai

    def chat(**options):
        return langchain_openai.ChatOpenAI(
            base_url=f"{url}/v1", api_key=KEY, model=MODEL, max_retries=0, **{"max_tokens": 60, **options}
        )

    text = langchain_openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, max_tokens=8, max_retries=0)
    report = report_model()

    def structured(method):
        return lambda: expect(
            chat().with_structured_output(report, method=method).invoke("Hello").city, "nothing was parsed"
        )

    return "langchain-openai", {
        "completion": lambda: expect(isinstance(text.invoke("def f("), str), "no text"),
        "completion stream": lambda: expect(list(text.stream("def f(")), "no chunks"),
        "chat": lambda: expect(chat().invoke("Hello").usage_metadata, "no usage"),
        "chat stream": lambda: expect(list(chat(max_tokens=8, stream_usage=True).stream("Hello")), "no chunks"),
        "batch": lambda: expect(len(chat(max_tokens=8).batch(["a", "b", "c"])) == 3, "not three"),
        "logprobs": lambda: expect(
            chat(logprobs=True, top_logprobs=2).invoke("Hello").response_metadata["logprobs"]["content"], "none"
        ),
        "tools, forced": lambda: expect(
            chat().bind_tools([WEATHER], tool_choice="weather").invoke("Hello").tool_calls[0]["args"]["city"], "no call"
        ),
        "structured output, json_schema": structured("json_schema"),
        "structured output, function_calling": structured("function_calling"),
        "error 400": lambda: raises(openai.BadRequestError, chat(temperature=-1).invoke, "Hello"),
        "responses": lambda: chat(use_responses_api=True).invoke("Hello"),
    }


def litellm(url):
    library = importlib.import_module("litellm")
    library.suppress_debug_info = True

    def chat(provider="hosted_vllm", **options):
        base = {"api_base": f"{url}/v1", "api_key": KEY, "max_tokens": 60, "num_retries": 0}
        return library.completion(model=f"{provider}/{MODEL}", messages=USER, **{**base, **options})

    def text(**options):
        return library.text_completion(
            model=f"text-completion-openai/{MODEL}", prompt="def f(", api_base=f"{url}/v1", api_key=KEY, **options
        )

    return "litellm", {
        "completion": lambda: expect(text(max_tokens=8).choices, "no answer"),
        "completion stream": lambda: expect(list(text(max_tokens=8, stream=True)), "no chunks"),
        "chat (hosted_vllm)": lambda: expect(chat().usage.prompt_tokens, "no usage"),
        "chat (openai)": lambda: expect(chat("openai").usage.prompt_tokens, "no usage"),
        "chat stream": lambda: expect(list(chat(stream=True)), "no chunks"),
        "logprobs": lambda: expect(chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content, "none"),
        "tools, forced": lambda: calls(
            chat(tools=[WEATHER], tool_choice=FORCED).choices[0].message.tool_calls[0].function.arguments
        ),
        "JSON schema": lambda: fits(chat(response_format=FORMAT).choices[0].message.content),
        "error 400": lambda: raises(library.BadRequestError, chat, temperature=-1.0),
        "error 404": lambda: raises(library.NotFoundError, chat, "hosted_vllm/no-such"),
        "error of length": lambda: raises(library.ContextWindowExceededError, chat, "openai", max_tokens=10**6),
    }


def instructor(url):
    import openai

    library = importlib.import_module("instructor")
    report = report_model()

    def ask(mode, **options):
        client = library.from_openai(
            openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0), mode=getattr(library.Mode, mode)
        )
        return client.chat.completions.create(
            model=MODEL, messages=USER, response_model=report, max_retries=0, max_tokens=60, **options
        )

    return "instructor", {
        **{mode: (lambda mode=mode: expect(ask(mode).city, mode)) for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA")},
        "JSON": lambda: expect(ask("JSON").city, "JSON"),
        "error 400": lambda: raises(Exception, ask, "TOOLS", text="Error code: 400", temperature=-1),
        "RESPONSES_TOOLS": lambda: ask("RESPONSES_TOOLS"),
    }


def outlines(url):
    import openai

    library = importlib.import_module("outlines")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    plain, vllm = library.from_openai(client, MODEL), library.from_vllm(client, MODEL)
    report = report_model()
    grammar = '?start: "yes" | "no"'
    return "outlines", {
        "from_openai, text": lambda: expect(isinstance(plain("Hello", max_tokens=8), str), "no text"),
        "from_openai, stream": lambda: expect(list(plain.stream("Hello", max_tokens=8)), "no chunks"),
        "from_openai, JSON schema": lambda: fits(plain("Hello", report, max_tokens=60)),
        "from_vllm, JSON schema": lambda: fits(vllm("Hello", report, max_tokens=60)),
        "from_vllm, choice": lambda: expect(vllm("Hello", Literal["yes", "no"]) in ("yes", "no"), "neither"),
        "from_vllm, regex": lambda: expect(
            vllm("Hello", library.regex("[0-9]{3}"), max_tokens=8).isdigit(), "no digits"
        ),
        "from_vllm, CFG": lambda: expect(vllm("Hello", library.types.CFG(grammar)) in ("yes", "no"), "neither"),
    }


def llama_index(url):
    llms = importlib.import_module("llama_index.llms.openai_like")
    report = report_model()
    tools = importlib.import_module("llama_index.core.tools")

    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """Tell the weather of a city."""
        return f"20 C in {city}"

    def made(**options):
        common = {"model": MODEL, "api_base": f"{url}/v1", "api_key": KEY, "max_tokens": 60, "max_retries": 0}
        return llms.OpenAILike(**common | {"is_chat_model": True, "is_function_calling_model": True} | options)

    tool = tools.FunctionTool.from_defaults(weather)
    text = made(is_chat_model=False, is_function_calling_model=False)
    by_schema = made(is_function_calling_model=False, should_use_structured_outputs=True)
    return "llama-index-llms-openai-like", {
        "completion": lambda: expect(text.complete("def f(").text, "no text"),
        "completion stream": lambda: expect(list(text.stream_complete("def f(")), "no chunks"),
        "chat": lambda: expect(made().complete("Hello").raw.usage.completion_tokens, "no usage"),
        "chat stream": lambda: expect(list(made().stream_complete("Hello")), "no chunks"),
        "tools, predict_and_call": lambda: expect(
            made().predict_and_call([tool], user_msg="Hello", tool_required=True).response, "no call"
        ),
        "structured, by call": lambda: expect(made().as_structured_llm(report).complete("Hello").raw.city, "none"),
        "structured, by schema": lambda: expect(by_schema.as_structured_llm(report).complete("Hello").raw.city, "none"),
    }


def pydantic_ai(url):
    library = importlib.import_module("pydantic_ai")
    models = importlib.import_module("pydantic_ai.models.openai")
    provider = importlib.import_module("pydantic_ai.providers.openai").OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    report = report_model()

    def made(api, **options):
        kind = models.OpenAIChatModel if api == "chat" else models.OpenAIResponsesModel
        return library.Agent(kind(MODEL, provider=provider), model_settings={"max_tokens": 100}, **options)

    async def streamed(api):
        async with made(api, output_type=report).run_stream("Hello") as run:
            return [part async for part in run.stream_output()][-1]

    def calls(api):
        return {
            f"{api}, text": lambda: expect(made(api).run_sync("Hello").usage.output_tokens, "no usage"),
            f"{api}, output by call": lambda: expect(
                made(api, output_type=report).run_sync("Hello").output.city, "none"
            ),
            f"{api}, output by schema": lambda: expect(
                made(api, output_type=library.NativeOutput(report)).run_sync("Hello").output.city, "none"
            ),
            f"{api}, streamed output": lambda: expect(asyncio.run(streamed(api)).city, "none"),
        }

    return "pydantic-ai-slim", {
        **calls("chat"),
        **calls("responses"),
        "error 400": lambda: raises(
            library.ModelHTTPError, made("chat").run_sync, "Hello", text="400", model_settings={"temperature": -1}
        ),
    }


def openai_agents(url):
    import openai

    library = importlib.import_module("agents")
    library.set_tracing_disabled(True)

    @library.function_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """Tell the weather of a city."""
        return f"20 C in {city}"

    def run(is_streamed=False, **options):
        settings = {"max_tokens": 200, "parallel_tool_calls": False, "include_usage": True}
        if "tools" in options:
            settings["tool_choice"] = "required"  # in the first turn only

        async def made():
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
                model = library.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
                agent = library.Agent("a", model=model, model_settings=library.ModelSettings(**settings), **options)
                if not is_streamed:
                    return await library.Runner.run(agent, "Hello")
                run = library.Runner.run_streamed(agent, "Hello")
                expect([event async for event in run.stream_events()], "no events")
                return run

        return asyncio.run(made())

    return "openai-agents", {
        "text": lambda: expect(run().final_output, "no text"),
        "tools": lambda: expect(len(run(tools=[weather]).new_items) == 3, "no loop"),
        "tools, stream": lambda: expect(len(run(is_streamed=True, tools=[weather]).new_items) == 3, "no loop"),
        "output by schema": lambda: expect(run(output_type=report_model()).final_output.city, "none"),
    }


def _run(*command):
    ended = subprocess.run(
        [Path(sys.executable).parent / command[0], *command[1:]], capture_output=True, text=True, timeout=240
    )
    expect(ended.returncode == 0, (ended.stdout + ended.stderr)[-600:])


def counted(url):
    """Tokens of prompts and answers that the server has counted."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        values = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))
    return [float(values[f"baton_{kind}_tokens_total"]) for kind in ("prompt", "generation")]


def agrees(url, before, *found):
    deadline = time.monotonic() + 10.0  # a request is counted once its answer has ended
    while (own := [now - then for now, then in zip(counted(url), before, strict=True)]) != [*found]:
        expect(time.monotonic() < deadline, f"the tool counted {found} tokens, the server {own}")
        time.sleep(0.1)


def guidellm(url, tokenizer):
    def run(kind):
        with tempfile.TemporaryDirectory() as folder:
            before = counted(url)
            _run(
                *("guidellm", "run", "--backend", f"kind=openai_http,target={url},model={MODEL},request_format={kind}"),
                *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
                *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
                *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
                *("--output", f"kind=json,path={folder}/report.json", "--disable-console-interactive"),
            )
            metrics = json.loads(Path(folder, "report.json").read_text())["benchmarks"][0]["metrics"]
            totals = metrics["request_totals"]
            expect(totals["successful"] == 6 and not totals["errored"], totals)
            kinds = ("prompt_token_count", "output_token_count")
            agrees(url, before, *(metrics[kind]["successful"]["total_sum"] for kind in kinds))

    return "guidellm", {kind: (lambda kind=kind: run(kind)) for kind in ("/v1/completions", "/v1/chat/completions")}


def aiperf(url, tokenizer):
    def run(kind, *options):
        with tempfile.TemporaryDirectory() as folder:
            before = counted(url)
            _run(
                *("aiperf", "profile", "--model", MODEL, "--url", url, "--endpoint-type", kind),
                *("--tokenizer", tokenizer, "--use-server-token-count", "--extra-inputs", "ignore_eos:true"),
                *("--request-count", "6", "--concurrency", "2", "--isl", "32", "--osl", "8", "--ui", "none"),
                *("--artifact-dir", folder, *options),
            )
            found = json.loads(next(Path(folder).rglob("profile_export_aiperf.json")).read_text())
            expect(found["request_count"]["avg"] == 6, found["request_count"])
            agrees(url, before, *(found[kind]["sum"] for kind in ("input_sequence_length", "output_sequence_length")))

    return "aiperf", {
        "completions": lambda: run("completions"),
        "completions, stream": lambda: run("completions", "--streaming"),
        "chat": lambda: run("chat"),
        "chat, stream": lambda: run("chat", "--streaming"),
    }


def evalscope(url, tokenizer):
    def run(path):
        with tempfile.TemporaryDirectory() as folder:
            before = counted(url)
            _run(
                *("evalscope", "perf", "--url", f"{url}/v1/{path}", "--api", "openai", "--model", MODEL),
                *("--tokenizer-path", tokenizer, "--dataset", "random", "--parallel", "2", "--number", "6"),
                *("--min-prompt-length", "32", "--max-prompt-length", "48", "--max-tokens", "8"),
                *("--extra-args", '{"ignore_eos": true}', "--no-test-connection", "--outputs-dir", folder),
            )
            found = json.loads(next(Path(folder).rglob("benchmark_summary.json")).read_text())
            expect(found["Success Requests"] == 6, found)
            agrees(url, before, *(round(6 * found[f"Avg {kind} Tokens"]) for kind in ("Input", "Output")))

    return "evalscope", {path: (lambda path=path: run(path)) for path in ("completions", "chat/completions")}


def inference_perf(url, tokenizer):
    def run():
        with tempfile.TemporaryDirectory() as folder:
            before = counted(url)
            size = "{min: 32, max: 32, mean: 32, std_dev: 0, total_count: 6}"
            config = Path(folder, "config.yml")
            config.write_text(
                "load: {type: constant, stages: [{rate: 2, duration: 3}], num_workers: 1}\n"
                "api: {type: completion, streaming: true}\n"
                f"server: {{type: vllm, model_name: {MODEL}, base_url: '{url}', ignore_eos: true}}\n"
                f"tokenizer: {{pretrained_model_name_or_path: {tokenizer}}}\n"
                f"data: {{type: random, input_distribution: {size}, output_distribution: {size}}}\n"
                "report: {request_lifecycle: {summary: true}}\n"
                f"storage: {{local_storage: {{path: {folder}}}}}\n"
            )
            _run("inference-perf", "--config_file", config)
            found = json.loads(Path(folder, "summary_lifecycle_metrics.json").read_text())
            expect((found["successes"]["count"], found["failures"]["count"]) == (6, 0), found["failures"])
            agrees(url, before, 6 * 32, 6 * 32)

    return "inference-perf", {"completions, stream": run}


def inspect_ai(url):
    library = importlib.import_module("inspect_ai")
    of_model, util = map(importlib.import_module, ("inspect_ai.model", "inspect_ai.util"))
    solver, tool = map(importlib.import_module, ("inspect_ai.solver", "inspect_ai.tool"))

    @tool.tool
    def weather():
        async def execute(city: Literal["Rome", "Oslo"]) -> str:
            """The weather of a city.

            Args:
                city: The city.
            """
            return f"{city}: sunny"

        return execute

    def run(*before, **options):
        model = of_model.get_model(f"openai-api/baton/{MODEL}", base_url=f"{url}/v1", api_key=KEY)
        task = library.Task([library.dataset.Sample("Hello")], solver=[*before, solver.generate(tool_calls="none")])
        with tempfile.TemporaryDirectory() as folder:
            (log,) = library.eval(task, model, max_tokens=100, display="none", log_dir=folder, **options)
            expect(log.status == "success", log.error)
            return log.samples[0].output

    schema = of_model.ResponseSchema(name="report", json_schema=util.JSONSchema(**SCHEMA), strict=True)
    return "inspect-ai", {
        "text": lambda: expect(run().completion, "no text"),
        "logprobs": lambda: expect(run(logprobs=True, top_logprobs=2).choices[0].logprobs.content, "none"),
        "JSON schema": lambda: fits(run(response_schema=schema).completion),
        "forced tools": lambda: expect(
            run(solver.use_tools(weather(), tool_choice="any"), parallel_tool_calls=False)
            .message.tool_calls[0]
            .arguments["city"],
            "none",
        ),
    }


def lm_eval(url, tokenizer):
    """Log-probabilities of choices, of whole texts, and texts generated up to a line's end, of a task made here."""
    kinds = {
        "multiple_choice": "doc_to_choice: ['{{a}}', '{{b}}']\ndoc_to_target: 0\nmetric_list: [{metric: acc}]",
        "loglikelihood_rolling": "doc_to_target: '{{q}} {{a}}'\nmetric_list: [{metric: word_perplexity}]",
        "generate_until": "doc_to_target: '{{a}}'\nmetric_list: [{metric: exact_match}]\n"
        "generation_kwargs: {until: ['\\n'], max_gen_toks: 8}",
    }

    def run(kind, backend):
        with tempfile.TemporaryDirectory() as folder:
            task, answers = Path(folder, "task.yaml"), Path(folder, "task.jsonl")
            answers.write_text(
                "".join(json.dumps({"q": q, "a": "self", "b": "%%"}) + "\n" for q in ("def f(", "def g("))
            )
            task.write_text(
                f"task: made\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {answers}}}}}\n"
                f"test_split: test\noutput_type: {kind}\n"
                f"doc_to_text: '{'' if kind.endswith('rolling') else '{{q}}'}'\n{kinds[kind]}\n"
            )
            _run(
                *("lm_eval", "run", "--model", "local-completions", "--tasks", "made", "--include_path", folder),
                *("--model_args", f"base_url={url}/v1/completions,model={MODEL},max_length=2048,{backend}"),
                *("--output_path", folder),
            )
            expect(json.loads(next(Path(folder).rglob("results_*.json")).read_text())["results"]["made"], "no results")

    return "lm_eval", {
        f"{kind}, {name}": (lambda kind=kind, backend=backend: run(kind, backend))
        for name, backend in (
            ("its tokenizer", f"tokenizer_backend=huggingface,tokenizer={tokenizer}"),
            ("the server's", "tokenizer_backend=remote"),
        )
        for kind in kinds
    }


OF_OPENAI = (openai_python, openai_agents, langchain, llama_index, litellm, instructor, outlines, pydantic_ai)
TOOLS = (lm_eval, inspect_ai, guidellm, aiperf, evalscope, inference_perf)
CLIENTS = {client.__name__: client for client in (*OF_OPENAI, anthropic_python, *TOOLS)}


def main(url, client, *tokenizer):
    package, found = CLIENTS[client](url, *tokenizer)
    print(f"{package} {importlib.metadata.version(package)}", flush=True)
    for name, call in found.items():
        try:
            call()
            print(f"  {name}: works", flush=True)
        except Exception as error:  # noqa: BLE001 # whatever a client raises is the finding
            print(f"  {name}: {type(error).__name__}: {str(error)[:500]}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
