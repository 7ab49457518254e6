"""Sends requests to /v1/completions of an OpenAI endpoint, and reads their streams. aiohttp is the extra `bench`."""

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from baton.bench.serve.drive import Record
from baton.bench.serve.schedule import Planned
from baton.bench.serve.workload import OfferedLoad
from baton.core.clock import Clock
from baton.core.errors import PackageMissing

if TYPE_CHECKING:
    import aiohttp

DETAIL_LEN: Final = 300
_MAX_LINE: Final = 16 << 20
_KEEPALIVE_S: Final = (
    2.0  # below what servers keep idle connections for (5 s at uvicorn), so that none is used too late
)


@dataclass(frozen=True, slots=True)
class ServedSystem:
    """One endpoint under test.

    Attributes:
        name: name in rows.
        url: URL without `/v1` and without a slash at the end.
        model: model to request.
    """

    name: str
    url: str
    model: str = ""


def require_aiohttp() -> None:
    """Check that requests can be sent.

    Raises:
        PackageMissing: aiohttp is not importable.
    """
    if importlib.util.find_spec("aiohttp") is None:
        message = "`baton bench serve` needs aiohttp, which is not installed: pip install 'baton-pd[bench]'"
        raise PackageMissing(message, package="aiohttp")


class SseLines:
    """Splits a byte stream into the payloads of its `data:` lines, however they are cut into reads."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that are complete now.

        Raises:
            ValueError: a line has no end.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            raise ValueError(f"a line of more than {_MAX_LINE} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def note_event(record: Record, payload: bytes, now_s: float) -> bool:
    """Record an event of a completion's stream; return whether it was the last one.

    Raises:
        ValueError: it is not what an OpenAI endpoint sends.
    """
    if payload == b"[DONE]":
        return True
    event = json.loads(payload)
    if not isinstance(event, dict):
        raise ValueError("an event is no JSON object")
    if error := event.get("error"):
        record.error, record.detail = "stream_error", json.dumps(error)[:DETAIL_LEN]
        return True
    if event.get("choices"):
        record.chunk_times_s.append(now_s)
    if usage := event.get("usage"):
        record.prompt_tokens, record.completion_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return False


def judge(record: Record, is_complete: bool) -> None:
    """Record what is wrong with a stream that ended without an error."""
    if record.error or record.cancelled:
        return
    if not is_complete:
        record.error = "truncated"
    elif not record.chunk_times_s:
        record.error = "no_tokens"
    elif record.num_tokens != record.output_len and record.completion_tokens is not None:
        record.error, record.detail = "wrong_length", f"{record.num_tokens} tokens for {record.output_len}"


def body_of(planned: Planned, tokens: list[int], load: OfferedLoad, model: str) -> bytes:
    """JSON body of a request: token ids, greedy, with exactly the requested length.

    A tenant is named in `user` and, if it has no API key, also in `cache_salt`, which Baton treats as the tenant and by
    which other servers separate prefix caches.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": tokens,
        "max_tokens": planned.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if planned.tenant:
        body["user"] = planned.tenant
        if load.tenants[planned.tenant].api_key_env is None:
            body["cache_salt"] = planned.tenant
    return json.dumps(body, separators=(",", ":")).encode()


class CompletionsClient:
    """Sends requests to one system; a context manager.

    Args:
        system: endpoint.
        load: load that the requests belong to.
        keys: values of the environment variables that tenants name.
        default_key: API key of requests whose tenant names none; None: none.
        clock: of the records.
        body: function that makes a request's body.
    """

    def __init__(
        self,
        system: ServedSystem,
        load: OfferedLoad,
        keys: Mapping[str, str],
        default_key: str | None,
        clock: Clock,
        body: Callable[[Planned], bytes],
    ) -> None:
        self._url = f"{system.url}/v1/completions"
        self._clock, self._body = clock, body
        self._headers = {
            tenant: headers_of(keys[entry.api_key_env] if entry.api_key_env else default_key)
            for tenant, entry in load.tenants.items()
        } | {"": headers_of(default_key)}
        self._timeout_s = load.timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = open_session(self._timeout_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(self, planned: Planned, record: Record, on_first: Callable[[], None]) -> None:
        """Send a request and record what arrives; see `drive.Send`."""
        import aiohttp

        try:
            await self._send(planned, record, on_first)
        except TimeoutError:
            record.error, record.detail = "timeout", f"no end within {self._timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            record.error, record.detail = "connect", str(error)[:DETAIL_LEN]
        except (aiohttp.ClientError, OSError) as error:
            record.error, record.detail = "connection_lost", f"{type(error).__name__}: {error}"[:DETAIL_LEN]
        except (ValueError, AttributeError, TypeError) as error:
            record.error, record.detail = "bad_stream", f"{type(error).__name__}: {error}"[:DETAIL_LEN]

    async def _send(self, planned: Planned, record: Record, on_first: Callable[[], None]) -> None:
        assert self._session is not None
        lines, is_complete = SseLines(), False
        headers = self._headers[planned.tenant]
        async with self._session.post(self._url, data=self._body(planned), headers=headers) as response:
            record.status = response.status
            if response.status != 200:
                record.error = f"http_{response.status}"
                record.detail = (await response.content.read(DETAIL_LEN)).decode(errors="replace")
                return
            async for data in response.content.iter_any():
                now_s = self._clock.now_s()
                for payload in lines.feed(data):
                    is_complete = note_event(record, payload, now_s) or is_complete
                if record.chunk_times_s:
                    on_first()
                if planned.cancel_after is not None and record.num_tokens >= planned.cancel_after and not is_complete:
                    record.cancelled = True
                    response.close()
                    return
        judge(record, is_complete)


def headers_of(key: str | None) -> dict[str, str]:
    """Headers of a request with that API key."""
    found = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    return found | ({"Authorization": f"Bearer {key}"} if key else {})


def open_session(timeout_s: float) -> "aiohttp.ClientSession":
    """Open a session with as many connections as there are requests."""
    import aiohttp

    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        read_bufsize=1 << 18,
    )


async def ask_once(system: ServedSystem, prompt: list[int], key: str | None, timeout_s: float) -> tuple[int, str]:
    """Send one short completion outside any measurement; return HTTP status (0: no connection) and response text."""
    import aiohttp

    body = {"model": system.model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    return await _call("POST", f"{system.url}/v1/completions", headers_of(key), timeout_s, aiohttp, body)


async def list_models(system: ServedSystem, key: str | None, timeout_s: float) -> tuple[int, str]:
    """GET /v1/models; return HTTP status (0: no connection) and the body or the error."""
    import aiohttp

    return await _call("GET", f"{system.url}/v1/models", headers_of(key), timeout_s, aiohttp)


async def _call(
    method: str, url: str, headers: dict[str, str], timeout_s: float, aiohttp: Any, body: Any = None
) -> tuple[int, str]:
    headers = headers | {"Accept": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        async with open_session(timeout_s) as session:
            async with session.request(method, url, headers=headers, data=data) as response:
                return response.status, (await response.read()).decode(errors="replace")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return 0, f"{type(error).__name__}: {error}"
