"""Keys, tenants, certificates and limits hold over HTTP as they do over gRPC."""

import asyncio
import ssl
from contextlib import asynccontextmanager

import httpx2
import openai
import pytest

from baton.router.security import DoorLimits, RouterSecurity
from baton.tests.router.certificates import Authority
from baton.tests.router.openai.served import MODEL, sent_to, served
from baton.tests.router.test_security import Keys

pytestmark = [pytest.mark.fast, pytest.mark.asyncio]


@pytest.fixture
def inside(tmp_path):
    return Authority(tmp_path / "inside")


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path / "keys.jsonl")


@asynccontextmanager
async def guarded(inside, keys, **limits):
    security = RouterSecurity(
        tls=inside.files("router"), api_keys_file=str(keys.path), admin_port=0, limits=DoorLimits(**limits)
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


async def test_a_key_gets_an_answer_of_its_own_tenant(inside, keys):
    key = keys.add("ada", "acme")
    async with guarded(inside, keys) as (running, client):
        done = await client(key).completions.create(model=MODEL, prompt="hello", max_tokens=4)
        assert done.choices[0].text
        assert sent_to(running)[-1].tenant == "acme"
        with pytest.raises(openai.PermissionDeniedError):
            await client(key).completions.create(model=MODEL, prompt="hello", extra_body={"cache_salt": "other"})


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


async def test_nothing_crosses_in_clear(inside, keys):
    keys.add("ada", "acme")
    async with guarded(inside, keys) as (running, _), httpx2.AsyncClient() as plain:
        with pytest.raises(httpx2.TransportError):
            await plain.get(running.url.replace("https://", "http://") + "/health")


async def test_a_tenant_has_so_many_streams_over_both_ways_in(inside, keys):
    key = keys.add("ada", "acme")
    async with guarded(inside, keys, max_streams_per_tenant=1) as (running, client):
        with running.router.public.door.stream("acme"):
            with pytest.raises(openai.APIStatusError) as error:
                await client(key).completions.create(model=MODEL, prompt="hello", max_tokens=4)
            assert error.value.status_code in (429, 503)
        assert (await client(key).completions.create(model=MODEL, prompt="hello", max_tokens=4)).choices
        await asyncio.sleep(0)


async def test_a_body_is_no_larger_than_a_message(inside, keys):
    key = keys.add("ada", "acme")
    async with guarded(inside, keys, max_message_bytes=2_000) as (_, client):
        with pytest.raises(openai.APIStatusError) as error:
            await client(key).completions.create(model=MODEL, prompt="x" * 4_000, max_tokens=4)
        assert error.value.status_code == 413
