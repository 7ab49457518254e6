"""Options, streams and requests of `baton bench serve`, and small runs against a real router."""

import asyncio
import json

import pytest

pytest.importorskip("aiohttp")
from aiohttp import web

from baton.bench.serve import http, run
from baton.bench.serve.drive import Record
from baton.bench.serve.http import CompletionsClient, ServedSystem, SseLines, body_of, judge, note_event
from baton.bench.serve.process import ClientJob, ClientProcesses, ClientReport
from baton.bench.serve.run import bench_serve, check_length, choose_model, read_options, read_systems, read_vocab
from baton.bench.serve.schedule import schedule
from baton.bench.serve.workload import check_workload
from baton.cluster.commands.bench import bench_serve as bench_command
from baton.cluster.commands.bench import format_serve
from baton.cluster.outcome import ExitCode, Output
from baton.core.clock import MonotonicClock
from baton.core.errors import ConfigInvalid, PackageMissing, StartupError, StepFailed
from baton.tests.bench.test_serve_figures import rows as table_rows
from baton.tests.bench.test_serve_workload import CLOSED, KEY, load_of
from baton.tests.router.fakes import MODEL
from baton.tests.router.openai.served import served

WORKLOAD = """
seed = 3
[[load]]
name = "closed"
arrival = "closed"
clients = [2]
requests_per_client = 2
prompt_len = 12
output_len = 3
[[load]]
name = "open"
arrival = "poisson"
rate = 8
seconds = 1
prompt_len = [9, 12]
output_len = 2
prefixes = { count = 1, len = 8 }
streams = { count = 1, prompt_len = 4, output_len = 3 }
tenants = { a = {} }
"""


def body(**usage):
    return json.dumps({"choices": [], "usage": usage}).encode()


@pytest.mark.fast
def test_options_are_checked_before_anything_starts(tmp_path, monkeypatch):
    options = read_options("streams", url=["a=http://h:1/v1/", "http://h:2"], rounds=1, environment={})
    assert [(system.name, system.url) for system in options.systems] == [("a", "http://h:1"), ("h:2", "http://h:2")]
    assert (options.seed, options.vocab, options.processes) == (1, (1000, 30000), 4)
    for more, said in (
        ({"rounds": 0}, "rounds"),
        ({"processes": 65}, "processes"),
        ({"pause_s": -1}, "pause-s"),
        ({"vocab": "9"}, "vocab"),
        ({"api_key_env": "NONE"}, "NONE holds no API key"),
    ):
        with pytest.raises(ConfigInvalid, match=said):
            read_options("streams", **({"url": ["http://h:1"], "environment": {}} | more))
    monkeypatch.setattr(http.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PackageMissing, match=r"baton-pd\[bench\]"):
        read_options("streams", url=["http://h:1"])


@pytest.mark.fast
def test_urls_and_vocabularies_are_checked():
    for urls in ([], ["h:1"], ["ftp://h"], ["http://"], ["http://h:0"], ["http://h:x"], ["http://h", "http://h"]):
        with pytest.raises(ConfigInvalid, match="--url"):
            read_systems(urls)
    with pytest.raises(ConfigInvalid, match="api-key-env"):
        read_systems(["http://me:secret@h"])
    assert read_vocab("0-255") == (0, 255)
    for text in ("5-5", "9-1", "a-b", "1-999999999", "-1-4"):
        with pytest.raises(ConfigInvalid, match="LOW-HIGH"):
            read_vocab(text)


@pytest.mark.fast
def test_a_system_is_asked_for_a_model_it_has_and_that_is_long_enough():
    system = ServedSystem("a", "http://h")
    said = json.dumps({"data": [{"id": "m", "max_model_len": 10}]})
    assert choose_model(system, said).model == "m"
    with pytest.raises(ConfigInvalid, match="no model x"):
        choose_model(ServedSystem("a", "http://h", "x"), said)
    for text in ("<html>", "{}", '{"data": []}', '{"data": [1]}'):
        with pytest.raises(StartupError, match="no OpenAI endpoint"):
            choose_model(system, text)
    fits, too_long = (check_workload({"load": [CLOSED | {"output_len": length}]}) for length in (2, 3))
    check_length(ServedSystem("a", "http://h", "m"), fits, said)
    with pytest.raises(ConfigInvalid, match="may have 11 tokens"):
        check_length(ServedSystem("a", "http://h", "m"), too_long, said)
    check_length(ServedSystem("a", "http://h", "m"), too_long, '{"data": [{"id": "m"}]}')


@pytest.mark.fast
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_streams_are_split_alike_however_they_arrive(size):
    data = b': note\r\ndata: {"a":1}\r\n\r\ndata: two\n\nevent: x\ndata:[DONE]\n\n'
    lines = SseLines()
    found = [each for at in range(0, len(data), size) for each in lines.feed(data[at : at + size])]
    assert found == [b'{"a":1}', b"two", b"[DONE]"]


@pytest.mark.fast
def test_events_are_noted():
    record = Record(0.0, 0.0, 5, 2)
    assert not note_event(record, b'{"choices":[{"text":"x"}],"usage":null}', 1.0)
    assert not note_event(record, b'{"choices":[{"text":""}]}', 2.0)
    assert not note_event(record, body(prompt_tokens=5, completion_tokens=2, prompt_tokens_details=None), 2.0)
    assert note_event(record, b"[DONE]", 3.0)
    judge(record, True)
    assert (record.chunk_times_s, record.prompt_tokens, record.num_tokens, record.is_ok) == ([1.0, 2.0], 5, 2, True)
    for payload in (b"nonsense", b"[1]"):
        with pytest.raises(ValueError):
            note_event(record, payload, 1.0)
    assert note_event(record, b'{"error":{"message":"gone"}}', 4.0)
    assert (record.error, "gone" in record.detail) == ("stream_error", True)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("chunks", "tokens", "is_complete", "error"),
    [
        (2, 2, True, ""),
        (1, 2, True, ""),
        (1, None, True, ""),
        (2, 2, False, "truncated"),
        (0, 2, True, "no_tokens"),
        (2, 1, True, "wrong_length"),
    ],
)
def test_what_a_stream_lacks_is_named(chunks, tokens, is_complete, error):
    record = Record(0.0, 0.0, 5, 2, chunk_times_s=[1.0] * chunks, completion_tokens=tokens)
    judge(record, is_complete)
    assert record.error == error


@pytest.mark.fast
def test_bodies_are_the_same_for_every_system_and_name_the_tenant():
    load = load_of(CLOSED, tenants={"a": {"api_key_env": "K"}, "b": {"weight": 3}})
    bodies = {each.tenant: json.loads(body_of(each, [1, 2], load, "m")) for each in schedule(load, KEY)}
    assert bodies["a"] == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "a",
    }
    assert bodies["b"] == bodies["a"] | {"user": "b", "cache_salt": "b"}
    assert http.headers_of("k")["Authorization"] == "Bearer k"
    assert "Authorization" not in http.headers_of(None)


async def ask(handler, hold=None, **more):
    """The record of one request to a server that answers by `handler`, let go by `hold` once the client has left."""
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return await ask_at(url, **more)
    finally:
        if hold is not None:
            hold.set()
        await runner.cleanup()


async def ask_at(url, keys=None, **more):
    load = load_of(CLOSED, clients=[1], requests_per_client=1, **more)
    (planned,) = schedule(load, KEY)
    record = Record(0.0, 0.0, planned.prompt.length, planned.output_len)
    system = ServedSystem("a", url, "m")
    client = CompletionsClient(
        system, load, keys or {}, "k", MonotonicClock(), lambda it: body_of(it, [1, 2], load, "m")
    )
    async with client:
        await client.send(planned, record, lambda: None)
    return record


def streaming(*events, hold=None):
    async def handler(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(b"data: " + event + b"\n\n")
        if hold is not None:
            await hold.wait()
        return response

    return handler


TOKEN = b'{"choices":[{"text":"x"}]}'


@pytest.mark.fast
@pytest.mark.asyncio
async def test_what_goes_wrong_on_the_wire_is_named():
    async def busy(request):
        return web.Response(status=429, text="full")

    done = (body(completion_tokens=2), b"[DONE]")
    assert (await ask(streaming(TOKEN, TOKEN, *done))).error == ""
    record = await ask(busy)
    assert (record.error, record.status, record.detail) == ("http_429", 429, "full")
    assert (await ask(streaming(TOKEN))).error == "truncated"
    assert (await ask(streaming(TOKEN, *done[1:]))).error == ""
    assert (await ask(streaming(b"nonsense"))).error == "bad_stream"
    assert (await ask_at("http://127.0.0.1:1")).error == "connect"


@pytest.mark.fast
@pytest.mark.asyncio
async def test_a_client_goes_away_after_as_many_tokens_as_planned():
    hold = asyncio.Event()

    events = streaming(TOKEN, TOKEN, TOKEN, hold=hold)
    record = await ask(events, hold, output_len=9, cancel={"share": 1, "after_tokens": 2})
    assert record.cancelled and not record.error
    assert len(record.chunk_times_s) >= 2


@pytest.mark.fast
@pytest.mark.asyncio
async def test_keys_are_sent_as_the_tenants_say():
    seen = []

    async def handler(request):
        seen.append(request.headers["Authorization"])
        return await streaming(TOKEN, TOKEN, b"[DONE]")(request)

    await ask(handler, tenants={"a": {"api_key_env": "K"}}, keys={"K": "secret"})
    await ask(handler)
    assert seen == ["Bearer secret", "Bearer k"]


@pytest.mark.fast
@pytest.mark.asyncio
async def test_a_server_that_hangs_is_a_timeout():
    hold = asyncio.Event()
    record = await ask(streaming(TOKEN, hold=hold), hold, timeout_s=0.05)
    assert record.error == "timeout"


@pytest.mark.fast
def test_systems_are_measured_in_turns_and_warm_up_rounds_do_not_count(tmp_path, monkeypatch):
    path = tmp_path / "small.toml"
    path.write_text(WORKLOAD)
    seen = []

    class Clients:
        def __init__(self, num):
            self.num = num

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __len__(self):
            return self.num

        def run(self, jobs):
            seen.append((jobs[0].load.name, jobs[0].key.round, jobs[0].system.name))
            assert [(job.process, job.num_processes) for job in jobs] == [(0, 2), (1, 2)]
            late_s = 0.1 if jobs[0].system.name == "b" else 0.0
            record = Record(0.0, late_s, 5, 2, chunk_times_s=[1.0, 2.0], end_s=2.0, is_open=True)
            return [ClientReport([record], 1.0, 0.1), ClientReport([], 2.0, 0.2)], 0.0

    async def probe(options, note):
        return list(options.systems)

    monkeypatch.setattr(run, "ClientProcesses", Clients)
    monkeypatch.setattr(run, "_probe", probe)
    urls = ["a=http://h", "b=http://i"]
    options = read_options(str(path), url=urls, rounds=2, warmup=1, processes=2, pause_s=0, environment={})
    data = bench_serve(options, lambda text: None)
    turns = [(number, system) for number in (-1, 0, 1) for system in "ab"]
    assert seen == [(load, *turn) for load in ("closed", "open") for turn in turns]
    assert [(row["load"], row["system"], row["num_ok"], row["client_limited"]) for row in data["rows"]] == [
        ("closed", "a", 2, False),
        ("closed", "b", 2, True),
        ("open", "a", 2, False),
        ("open", "b", 2, True),
    ]
    assert (data["rows"][0]["ttft_p50_ms"], data["rows"][0]["client_cpu_max"]) == (1000, 0.2)


def test_a_client_process_that_fails_or_ends_is_named():
    load = load_of(CLOSED, tenants={"a": {"api_key_env": "K"}})
    job = ClientJob(ServedSystem("a", "http://127.0.0.1:1", "m"), load, KEY, 0, 1, (1, 9), {}, None)
    with ClientProcesses(1) as clients:
        with pytest.raises(StepFailed, match="a client process failed: KeyError"):
            clients.run([job])
        clients._processes[0].kill()
        with pytest.raises(StepFailed, match="a client process has ended"):
            clients.run([job])


@pytest.mark.fast
@pytest.mark.parametrize(("more", "code"), [({}, ExitCode.OK), ({"client_limited": True}, ExitCode.PARTIAL)])
def test_the_command_prints_saves_and_says_whether_its_rows_are_valid(tmp_path, monkeypatch, capsys, more, code):
    data = {"rows": [table_rows()[0] | more], "rounds": 1, "seed": 1}

    def measure(options, note, save):
        save(data)
        return data

    monkeypatch.setattr(run, "bench_serve", measure)
    out = tmp_path / "out.json"
    assert bench_command(Output(as_json=True), out=out, plot=None, workload="streams", url=["http://h"]) is code
    assert json.loads(out.read_text()) == data
    assert json.loads(capsys.readouterr().out)["rows"] == data["rows"]
    with pytest.raises(ConfigInvalid, match="--out"):
        bench_command(Output(True), out=tmp_path / "no" / "x.json", plot=None, workload="streams", url=["http://h"])


@pytest.mark.asyncio
async def test_two_processes_measure_a_real_router(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(WORKLOAD)
    saved = []
    async with served() as (running, _):
        urls = [f"a={running.url}", f"b={running.url}"]
        options = read_options(str(path), url=urls, rounds=1, processes=2, vocab="1-200", pause_s=0, environment={})
        data = await asyncio.to_thread(bench_serve, options, lambda text: None, saved.append)
        with pytest.raises(ConfigInvalid, match="no model other"):
            await run._probe(read_options(str(path), url=urls, model="other", vocab="1-200"), print)
        with pytest.raises(ConfigInvalid, match="a refuses a first request"):
            await run._probe(read_options(str(path), url=urls, vocab="1-20000"), print)
    assert [(row["load"], row["point"], row["system"]) for row in data["rows"]] == [
        ("closed", "2 clients", "a"),
        ("closed", "2 clients", "b"),
        ("open", "8/s", "a"),
        ("open", "8/s", "b"),
    ]
    for row in data["rows"]:
        assert row["num_failed"] == 0, row["examples"]
        assert row["num_ok"] == row["num_requests"] > 0
        assert row["ttft_p50_ms"] > 0 and row["e2e_p99_ms"] >= row["e2e_p50_ms"]
    closed, opened = data["rows"][0], data["rows"][2]
    assert (closed["num_ok"], closed["goodput_share"]) == (4, 1.0)
    assert opened["num_ok"] == data["rows"][3]["num_ok"], "both systems are sent the same"
    assert opened["steady_chunks_per_s"] > 0 and "send_lag_p99_ms" in opened
    assert data["systems"]["a"]["model"] == MODEL
    assert len(saved) == 2 and json.dumps(saved[-1])
    assert "steady streams" in format_serve(data)


@pytest.mark.fast
@pytest.mark.asyncio
async def test_a_system_that_is_not_there_is_named():
    options = read_options("streams", url=["http://127.0.0.1:1"], environment={})
    with pytest.raises(StartupError, match=r"127\.0\.0\.1:1"):
        await run._probe(options, print)
