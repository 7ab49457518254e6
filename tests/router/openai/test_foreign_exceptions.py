"""Whatever HTTP's side of the router raises ends that call alone, with a typed error, in one piece or in the stream."""

import json

import httpx2
import psutil
import pytest

from baton.router.openai.connection import HttpServer  # noqa: F401  the modules below are loaded with it
from baton.router.openai.limits import LIGHT_ITEMS
from baton.tests.e2e.foreign import Injection
from baton.tests.router.openai.served import served

pytestmark = pytest.mark.asyncio
MODULES = [
    f"baton.router.openai.{name}"
    for name in (
        "generation", "body", "body_reader", "understand", "understood", "limits", "chat_request", "chats",
        "completions", "options", "reply", "tool_calls", "tokens", "token_names", "connection", "front",
    )
]  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "logprobs": True, "top_logprobs": 1}
TEXT = {"prompt": "hi", "max_tokens": 8, "stop": ["zz"], "logprobs": 1}
HEAVY = TEXT | {"logit_bias": {str(token): 1.0 for token in range(LIGHT_ITEMS)}}
CALLS = {
    "chat": ("chat/completions", CHAT),
    "chat stream": ("chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    "text": ("completions", TEXT),
    "text stream": ("completions", TEXT | {"stream": True}),
    "text read by another process": ("completions", HEAVY),
}
SAMPLE = 24  # points, always the same, of which a call passes some 8
WAIT_S = 60.0


async def ask(url, path, body):
    """(status, the error's code if there is one)"""
    async with httpx2.AsyncClient(timeout=WAIT_S) as client:
        reply = await client.post(f"{url}/v1/{path}", json=body)
    if not body.get("stream") or reply.status_code != 200:
        error = reply.json().get("error")
        return reply.status_code, error and error["code"]
    assert reply.text.endswith("data: [DONE]\n\n"), reply.text[-200:]
    events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line and line != "data: [DONE]"]
    return 200, next((event["error"]["code"] for event in events if "error" in event), None)


async def sweep(call, number=None, modules=MODULES):
    path, body = CALLS[call]
    injection, findings, ends = Injection(modules), [], {}
    try:
        async with served() as (running, _):
            running.script.logprobs = None
            path, body = CALLS[call]
            body = {key: value for key, value in body.items() if "logprobs" not in key}
            injection.is_watching = True
            assert await ask(running.url, path, body) == (200, None)
            injection.is_watching = False
            # By where they stand in the source. Which a call passes may vary a little; the others are not tried.
            chosen = injection.sample(number or len(injection.points))
            points = sorted(injection.seen.intersection(chosen))
            assert len(points) > len(chosen) / 12, "the call passes hardly any of the code that is looked at"
            for point in points:
                before = running.router.metrics.total("requests_failed")
                injection.arm(point)
                where = injection.points[point]
                try:
                    end = await ask(running.url, path, body)
                except Exception as error:  # noqa: BLE001  whatever else a client sees is a finding
                    end = (0, repr(error))
                injection.armed = None
                ends[end] = ends.get(end, 0) + 1
                # What fails while a reply is written leaves nothing to write it with: the connection is closed.
                is_closed = end[0] == 0 and where[0].endswith((".reply", ".front"))
                if end not in ((200, None), (200, "internal_error"), (500, "internal_error")) and not is_closed:
                    findings.append((where, end))
                is_counted = running.router.metrics.total("requests_failed") > before
                if end[0] and end[1] and not is_counted:
                    findings.append((where, "was not counted", end))
                if await ask(running.url, path, body) != (200, None):
                    findings.append((where, "the next call failed"))
            await running.idle()
            if running.router.desired_state._admission.num_in_flight:
                findings.append("something is held")
            print(f"\n{len(points)} points of {len(chosen)}, of {len(injection.points)}: {ends}")
        for child in psutil.Process().children():
            if child.status() != psutil.STATUS_ZOMBIE and "baton.router.openai.reader_process" in child.cmdline():
                findings.append("a process that reads bodies is left")
                child.kill()  # else the event loop cannot be closed
    finally:
        injection.restore()
    return findings


@pytest.mark.long
@pytest.mark.fast
@pytest.mark.parametrize("call", CALLS)
async def test_a_foreign_exception_anywhere_ends_its_call_alone(call):
    assert await sweep(call, SAMPLE) == []


async def test_a_foreign_exception_in_the_reader_of_bodies_leaves_no_process():
    """Every point: what holds a process is nowhere else."""
    assert await sweep("text read by another process", modules=["baton.router.openai.body_reader"]) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("call", CALLS)
async def test_a_foreign_exception_at_every_point_ends_its_call_alone(call):
    assert await sweep(call) == []
