"""Reads bodies: takes no more bytes than may be, and lets other processes understand what would keep the loop busy.

What is light is understood at once. Anything else goes to a process of its own (reader_process), of which there are a
few: they are started when the first such body comes, end with the router, and are replaced when they fail.
"""

import asyncio
import logging
import secrets
import socket
import subprocess
import sys
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Self

from pydantic import BaseModel
from starlette.requests import Request

from baton.core.errors import BatonError, NoWorker, Overloaded, from_wire
from baton.router.inference import InferenceService
from baton.router.openai.body import read_bytes, too_large
from baton.router.openai.entrance import principal_of
from baton.router.openai.front import Forms, HttpConfig
from baton.router.openai.limits import is_light
from baton.router.openai.reader_process import first_frame, job_frame
from baton.router.openai.understand import understand
from baton.router.openai.understood import LENGTH_BYTES, Job, Understood, parted
from baton.router.served_model import ServedModel

NUM_PROCESSES: Final = 2
MAX_WAITING: Final = 64  # bodies
MAX_WAITING_OF_ONE: Final = 16  # of one principal, so that one's bodies leave room for others'
BODY_TIMEOUT_S: Final = 30.0  # for a body to come
ANSWER_TIMEOUT_S: Final = 120.0  # a process that says nothing for so long is ended
RETRY_AFTER_S: Final = 1.0
_COMMAND: Final = (sys.executable, "-m", "baton.router.openai.reader_process")

log = logging.getLogger(__name__)


class BodyReader:
    """Reads the bodies of all endpoints, from the first request to `close`.

    Args:
        inference: knows how long a request may be.
        model: whose tokenizer a process can load.
        config: the template, advised values and the largest body.
        body_timeout_s: for a body to come.
    """

    def __init__(
        self,
        inference: InferenceService,
        model: ServedModel,
        config: HttpConfig,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._inference = inference
        self._model = model
        self._config = config
        self._body_timeout_s = body_timeout_s
        self._forms = Forms(
            name=model.name, encode=model.tokenizer.encode, template=config.template, defaults=config.defaults
        )
        self._idle: list[_Process] = []
        self._places = asyncio.Semaphore(NUM_PROCESSES)
        self._num_of: Counter[str] = Counter()
        self.num_in_process = 0  # bodies that were not light

    async def read(self, request: Request, kind: type[BaseModel]) -> Understood:
        """What a request's body asks.

        Raises:
            HttpRefusal: it is too large, too slow, or not JSON by its own word.
            BatonError: it can be seen to be wrong, or too many bodies are being read.
        """
        body = await read_bytes(request, self._check_num_bytes, self._body_timeout_s)
        job = self._job(kind.__name__, request.headers.get("x-request-id"))
        if is_light(body):
            return understand(body, self._forms, job)
        with self._place_of(principal_of(request.scope).name):
            return Understood.from_parts(await self._ask(job, body), kind)

    async def close(self) -> None:
        """End the processes."""
        idle, self._idle = self._idle, []
        for process in idle:
            await process.end()

    def _check_num_bytes(self, num_bytes: int) -> None:
        if num_bytes > self._config.max_body_bytes:
            raise too_large(self._config.max_body_bytes)
        self._inference.check_num_bytes(num_bytes)

    def _job(self, kind: str, request_id: str | None) -> Job:
        try:
            max_model_len = self._inference.model().max_model_len
        except NoWorker:
            max_model_len = (1 << 31) - 1  # it is refused later, for that or for a better reason
        template = self._config.template
        return Job(
            kind=kind,
            request_id=secrets.token_hex(16) if request_id is None else request_id or " ",
            max_answers=self._inference.max_answers,
            max_model_len=max_model_len,
            keeps_schemas=template is not None and template.calls_have_tags,
        )

    async def _ask(self, job: Job, body: bytes) -> list[bytes]:
        self.num_in_process += 1
        async with self._process() as process:
            process.writer.write(job_frame(job, body))
            head = await process.reader.readexactly(LENGTH_BYTES)
            error, *parts = parted(await process.reader.readexactly(int.from_bytes(head, "little")))
        if error:
            raise from_wire(error.decode("ascii"))
        return parts

    @asynccontextmanager
    async def _process(self) -> AsyncIterator["_Process"]:
        """One that reads nothing else meanwhile. Whatever fails or is given up in between ends it."""
        async with self._places:
            process = self._idle.pop() if self._idle else None
            if process is None or process.returncode is not None:
                process = await self._start()
            is_sound = False
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    yield process
                is_sound = True
            except (asyncio.IncompleteReadError, OSError) as error:  # TimeoutError is one
                why = type(error).__name__
                log.warning("a process that reads bodies ended, or said nothing: %s, code %s", why, process.returncode)
                raise BatonError("the body could not be read; the router's log says more") from error
            finally:
                if is_sound:
                    self._idle.append(process)
                else:
                    await asyncio.shield(process.end())

    async def _start(self) -> "_Process":
        process = await _Process.start()
        process.writer.write(await asyncio.to_thread(first_frame, self._forms, self._model))
        return process

    @contextmanager
    def _place_of(self, principal: str) -> Iterator[None]:
        num = self._num_of.total()
        if num >= MAX_WAITING or self._num_of[principal] >= MAX_WAITING_OF_ONE:
            message = f"{num} long requests are being read, the limit; try again in {RETRY_AFTER_S:g} s"
            raise Overloaded(message, limit=MAX_WAITING, what="bodies", retry_after_s=RETRY_AFTER_S)
        self._num_of[principal] += 1
        try:
            yield
        finally:
            self._num_of[principal] -= 1
            if not self._num_of[principal]:
                del self._num_of[principal]


class _Process:
    """One process, over a socket that is its stdin and its stdout; it ends when the socket closes."""

    def __init__(self, child: "subprocess.Popen[bytes]", streams: tuple[StreamReader, StreamWriter]) -> None:
        self._child = child
        self.reader, self.writer = streams

    @classmethod
    async def start(cls) -> Self:
        """Start one."""
        ours, theirs = socket.socketpair()
        with theirs:
            # Not asyncio's way: uvloop forks, and gRPC's threads object to that.
            end = theirs.fileno()
            child = await asyncio.to_thread(lambda: subprocess.Popen(_COMMAND, stdin=end, stdout=end))
        return cls(child, await asyncio.open_connection(sock=ours))

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._child.poll()

    async def end(self) -> None:
        """Kill it."""
        self.writer.close()
        self._child.kill()
        await asyncio.to_thread(self._child.wait)
