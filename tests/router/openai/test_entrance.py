"""Keys, tenants, certificates and limits hold over HTTP as they do over gRPC."""

import asyncio
import logging
import ssl
from contextlib import asynccontextmanager

import httpx2
import openai
import pytest

from baton.core.errors import InvalidGrammar, InvalidRequest
from baton.core.telemetry.logs import TextFormatter
from baton.proto import inference_pb2
from baton.router.access.security import ClientLimits, RouterSecurity
from baton.router.openai.body_reader import NUM_PROCESSES
from baton.tests.router.certificates import Authority
from baton.tests.router.openai.served import MODEL, sent_to, served
from baton.tests.router.test_security import Keys, refused

pytestmark = [pytest.mark.fast, pytest.mark.asyncio]


@pytest.fixture
def inside(tmp_path):
    return Authority(tmp_path / "inside")


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path / "keys.jsonl")


@asynccontextmanager
async def guarded(inside, keys, admin_keys_file="", **limits):
    security = RouterSecurity(
        tls=inside.files("router"),
        api_keys_file=str(keys.path),
        admin_port=0,
        admin_keys_file=admin_keys_file,
        limits=ClientLimits(**limits),
    )
    async with served(security=security) as (running, _):
        trusting = ssl.create_default_context(cafile=str(inside.file))
        async with httpx2.AsyncClient(verify=trusting) as http:
            running.url = running.url.replace("http://", "https://")

            def client(key):
                return openai.AsyncOpenAI(
                    base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=15.0, http_client=http
                )

            running.http = http
            yield running, client


@pytest.mark.long
async def test_a_key_gets_an_answer_of_its_own_tenant(inside, keys):
    key = keys.add("ada", "acme")
    async with guarded(inside, keys) as (running, client):
        done = await client(key).completions.create(model=MODEL, prompt="hello", max_tokens=4)
        assert done.choices[0].text
        assert sent_to(running)[-1].tenant == "acme"
        with pytest.raises(openai.PermissionDeniedError):
            await client(key).completions.create(model=MODEL, prompt="hello", extra_body={"cache_salt": "other"})
        body = {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        for headers, status in (
            ({"x-api-key": key}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": key, "authorization": "Bearer wrong"}, 401),
        ):
            reply = await running.http.post(f"{running.url}/v1/messages", json=body, headers=headers)
            assert reply.status_code == status
            if status == 401:  # in Anthropic's form, whose clients have types of their own
                data = reply.json()
                assert (data["type"], data["error"]["type"]) == ("error", "authentication_error")


@pytest.mark.long
async def test_without_a_good_key_nothing_but_health_is_shown(inside, keys):
    keys.add("ada", "acme")
    async with guarded(inside, keys) as (running, client):
        with pytest.raises(openai.AuthenticationError):
            await client("wrong").chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
        for path in ("/v1/models", "/metrics", "/tokenize", "/v1/nothing"):
            reply = await running.http.request("POST" if path == "/tokenize" else "GET", running.url + path)
            assert reply.status_code == 401, path
            assert reply.json()["error"]["message"]
        for path in ("/health", "/ready"):
            assert (await running.http.get(running.url + path)).status_code == 200
        assert not sent_to(running)


@pytest.mark.long
@pytest.mark.parametrize(
    ("roles", "may_ask", "may_read_metrics"),
    [
        ((), True, True),
        (("client",), True, False),
        (("operator",), True, True),
        (("prefill", "decode"), False, False),
        (("someday",), False, False),
        (("prefill", "client"), True, False),
    ],
)
async def test_a_certificate_that_names_roles_is_held_to_them(inside, tmp_path, roles, may_ask, may_read_metrics):
    """As over gRPC; health is everybody's who has a certificate at all."""
    clients = Authority(tmp_path / "clients")
    own = clients.issue("caller", roles=roles)
    security = RouterSecurity(tls=inside.files("router"), client_ca_file=str(clients.file), admin_port=0)
    async with served(security=security) as (running, _):
        url = running.url.replace("http://", "https://")
        trusting = ssl.create_default_context(cafile=str(inside.file))
        trusting.load_cert_chain(own.cert_file, own.key_file)
        async with httpx2.AsyncClient(verify=trusting) as http:
            for path, is_allowed in (("/v1/models", may_ask), ("/metrics", may_read_metrics), ("/health", True)):
                reply = await http.get(url + path)
                assert (reply.status_code == 200) is is_allowed, (path, reply.text)
                assert is_allowed or (reply.status_code == 403 and "certificate" in reply.json()["error"]["message"])
        async with httpx2.AsyncClient(verify=ssl.create_default_context(cafile=str(inside.file))) as http:
            with pytest.raises(httpx2.TransportError):
                await http.get(url + "/health")


async def test_nothing_crosses_in_clear(inside, keys):
    keys.add("ada", "acme")
    async with guarded(inside, keys) as (running, _), httpx2.AsyncClient() as plain:
        with pytest.raises(httpx2.TransportError):
            await plain.get(running.url.replace("https://", "http://") + "/health")


async def test_a_tenant_has_so_many_streams_over_both_ways_in(inside, keys):
    key = keys.add("ada", "acme")
    async with guarded(inside, keys, max_streams_per_tenant=1) as (running, client):
        with running.router.public.authenticator.stream("acme"):
            with pytest.raises(openai.APIStatusError) as error:
                await client(key).completions.create(model=MODEL, prompt="hello", max_tokens=4)
            assert error.value.status_code in (429, 503)
        assert (await client(key).completions.create(model=MODEL, prompt="hello", max_tokens=4)).choices
        await asyncio.sleep(0)


@pytest.mark.long
async def test_bodies_of_one_tenant_are_no_reason_for_another_to_wait(inside, keys):
    """Whatever the names of its keys."""
    ada, ann, bob = keys.add("ada", "acme"), keys.add("ann", "acme"), keys.add("bob", "bolts")
    long = {"model": MODEL, "prompt": [1] * 300, "max_tokens": 4, "extra_body": {"unknown": [[]] * 60}}
    async with guarded(inside, keys) as (running, client):
        reader = running.router._reader
        held = [await reader._turns.take("acme") for _ in range(NUM_PROCESSES)]
        assert (await client(bob).completions.create(**long, timeout=60.0)).choices
        reader._place_timeout_s = 0.1
        for key in (ada, ann):
            with pytest.raises(openai.RateLimitError):
                await client(key).completions.create(**long)
        for give_back in held:
            give_back()


async def test_a_body_is_no_larger_than_a_message(inside, keys):
    key = keys.add("ada", "acme")
    async with guarded(inside, keys, max_message_bytes=2_000) as (_, client):
        with pytest.raises(openai.APIStatusError) as error:
            await client(key).completions.create(model=MODEL, prompt="x" * 4_000, max_tokens=4)
        assert error.value.status_code == 413


@pytest.mark.long
async def test_metrics_are_the_operators_where_clients_need_keys(inside, keys, tmp_path):
    tenant, operators = keys.add("ada", "acme"), Keys(tmp_path / "operators.jsonl")
    operator = operators.add("olga", "operators")

    async def status(running, key):
        headers = {"authorization": f"Bearer {key}"}
        return (await running.http.get(f"{running.url}/metrics", headers=headers)).status_code

    async with guarded(inside, keys) as (running, _):
        assert [await status(running, key) for key in (tenant, operator)] == [403, 401]
    async with guarded(inside, keys, admin_keys_file=str(operators.path)) as (running, _):
        assert [await status(running, key) for key in (tenant, operator)] == [401, 200]


async def test_a_quota_counts_answers_tokens_and_priority_not_calls(inside, keys):
    plain = keys.add("ada", "acme")
    high = keys.add("bob", "bolts", max_priority="high", max_queued_tokens=20)
    low = keys.add("eve", "evens", max_priority="low")
    async with guarded(inside, keys, max_streams_per_tenant=8) as (running, client):

        async def ask(key, **more):
            return await client(key).completions.create(**{"model": MODEL, "prompt": "hello", "max_tokens": 4} | more)

        assert len((await ask(plain, prompt=["a", "b"], n=4)).choices) == 8
        for more in ({"prompt": ["a", "b", "c"], "n": 3}, {"n": 9}):
            with pytest.raises(openai.BadRequestError, match="asks for 9 answers; 8 are the limit") as never:
                await ask(plain, **more)
            assert "retry-after" not in never.value.response.headers, "no time would let it in"
        assert refused(running, "streams_per_tenant") == 2
        assert (await ask(high, extra_body={"priority": -1})).choices
        assert (await ask(plain, extra_body={"priority": 1})).choices
        with pytest.raises(openai.PermissionDeniedError, match="priority"):
            await ask(plain, extra_body={"priority": -1})
        for more in ({}, {"priority": 0}, {"priority": 1}):
            assert (await ask(low, extra_body=more)).choices, "without a priority it is served with the one it may have"
        with pytest.raises(openai.PermissionDeniedError, match="priority"):
            await ask(low, extra_body={"priority": -1})
        for prompt in ("a" * 21, ["a" * 15, "b" * 6]):
            with pytest.raises(openai.BadRequestError, match="21 prompt tokens; 20 are the limit"):
                await ask(high, prompt=prompt)
        assert (await ask(high, prompt=["a" * 15, "b" * 5])).choices
        running.script.decode_hangs_after = 0
        stream = await ask(high, prompt="a" * 15, stream=True)
        with pytest.raises(openai.RateLimitError, match="15 prompt tokens under way, and asks for 6") as later:
            await ask(high, prompt="a" * 6)
        assert later.value.response.headers["retry-after"] == "1"
        await stream.close()
        running.script.decode_hangs_after = None
        await running.idle(3.0)
        async with asyncio.timeout(20):
            while running.router.public.authenticator._accounts:
                await asyncio.sleep(0.01)


async def test_headers_count_for_the_key_that_sends_them(inside, keys):
    small, large = keys.add("ada", "acme", max_header_bytes=2000), keys.add("bob", "bolts")
    async with guarded(inside, keys) as (running, client):

        async def ask(key, num_bytes):
            headers = {"x-much": "h" * num_bytes}
            return await client(key).completions.create(
                model=MODEL, prompt="hello", max_tokens=4, extra_headers=headers
            )

        assert (await ask(small, 10)).choices
        assert (await ask(large, 4000)).choices
        with pytest.raises(openai.BadRequestError, match="bytes of headers"):
            await ask(small, 2000)
        assert len(sent_to(running)) == 2
        assert (await ask(small, 10)).choices, "what was refused holds nothing"


async def test_no_secret_of_a_request_is_in_the_log(inside, caplog):
    """Whatever a worker says of a request that quotes it, and whatever a client calls its request."""
    caplog.set_level(logging.DEBUG, logger="baton")
    async with served() as (running, client):
        running.script.prefill_error = InvalidGrammar("regex: SECRET\n(unbalanced", kind="regex")
        for more in ({"guided_regex": "SECRET("}, {"guided_json": '{"SECRET": '}, {"guided_grammar": "SECRET:"}):
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model=MODEL, prompt="SECRET", extra_body=more)
        with pytest.raises(InvalidRequest, match="cannot be printed"):
            async with running.router.inference.open(
                [inference_pb2.GenerateRequest(text="a", request_id="a\n2026 CRITICAL FORGED")]
            ):
                pass
        await running.idle(3.0)
    lines = [TextFormatter().format(record) for record in caplog.records]
    assert any("InvalidGrammar (" in line for line in lines)
    assert not [line for line in lines if "SECRET" in line or "FORGED" in line]
