"""A router with HTTP in front of scripted workers, and OpenAI's own client."""

import ssl
from contextlib import asynccontextmanager

import openai

from baton.router.openai.chat_template import ChatTemplate
from baton.router.openai.front import HttpConfig
from baton.tests.router.fakes import MODEL, cluster

MAX_MODEL_LEN = 1000
# Nothing is encrypted here; without it every client would read the certificates of the whole world.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
CHATML = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ open_thought | default('') }}{% endif %}"
)


@asynccontextmanager
async def served(template=CHATML, num_prefill=1, num_decode=1, http=None, parser="auto", **config):
    """A running cluster of fakes and a client of its HTTP side."""
    made = None if template is None else ChatTemplate({"default": template}, None, parser)
    options = HttpConfig(**({"port": 0, "template": made} | (http or {})))
    async with cluster(0, 0, http=options, **config) as running:
        for role, num in (("prefill", num_prefill), ("decode", num_decode)):
            for index in range(num):
                await running.add(role, f"{role}-{index}", max_model_len=MAX_MODEL_LEN, block_size=MAX_MODEL_LEN)
        running.url = f"http://127.0.0.1:{running.router.http_port}"
        async with client_of(running.url) as client:
            yield running, client


def client_of(url, **options):
    options.setdefault("http_client", openai.DefaultAsyncHttpxClient(verify=NO_CERTIFICATES))
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=15.0, **options)


def sent_to(running):
    """What the prefill worker was sent, the newest last."""
    return [seen.request for seen in running.of("prefill")[0].seen]


def prompt_of(request):
    from baton.tests.router.fakes import TOKENIZER

    return TOKENIZER.decode(request.prompt_token_ids)


__all__ = ["MAX_MODEL_LEN", "MODEL", "client_of", "prompt_of", "sent_to", "served"]
