"""Reads request bodies within limits, and leaves those that would block the event loop to other processes.

Light bodies are parsed at once. All others go to one of a few processes (`reader_process`), for which tenants take
turns (`reading_queue`). One process starts with the router, the others when such bodies arrive; all end with the
router, and are replaced when they fail. A process that ended while it was idle costs no request anything: a new one
reads the body.
"""

import asyncio
import logging
import os
import secrets
import socket
import subprocess
import sys
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final, Self

from pydantic import BaseModel
from starlette.requests import Request

from baton.core.errors import InternalError, NoWorker, Overloaded, from_wire
from baton.core.inside import ENVIRONMENT
from baton.core.requests.answer_structure import MARKS
from baton.router.inference import InferenceService
from baton.router.openai.body import Translated, read_bytes, too_large
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.front import Forms, HttpConfig, principal_of
from baton.router.openai.limits import is_light
from baton.router.openai.reader_process import LAST, first_frame, job_frame
from baton.router.openai.reading_queue import ReadingQueue
from baton.router.openai.tool_calls import READ_BY_TOOLS
from baton.router.openai.understand import understand
from baton.router.openai.understood import LENGTH_BYTES, ReadingJob, Understood, parted
from baton.router.served_model import ServedModel

NUM_PROCESSES: Final = 2  # for one tenant; one more is for a tenant that uses none of them
MAX_WAITING_BYTES: Final = 256 << 20  # of all bodies that wait or are being read
MAX_WAITING_BYTES_OF_ONE: Final = 128 << 20  # of one principal's, so that there is room for others' bodies
BODY_TIMEOUT_S: Final = 30.0  # for a body to arrive
ANSWER_TIMEOUT_S: Final = 120.0  # a process silent for this long is ended
PLACE_TIMEOUT_S: Final = 60.0  # a body that no process has started on by then is refused
RETRY_AFTER_S: Final = 1.0
_COMMAND: Final = (sys.executable, "-m", "baton.router.openai.reader_process")

log = logging.getLogger(__name__)


class BodyReader:
    """Reads the bodies of all endpoints, from the first request to `close`.

    Args:
        inference: knows how large a request may be.
        model: the served model, whose tokenizer a process can load.
        config: chat template, recommended sampling values and the maximum body size.
        body_timeout_s: time for a body to arrive.
        answer_timeout_s: time for a process to parse one.
        place_timeout_s: time until a process starts on one.
    """

    def __init__(
        self,
        inference: InferenceService,
        model: ServedModel,
        config: HttpConfig,
        body_timeout_s: float = BODY_TIMEOUT_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        place_timeout_s: float = PLACE_TIMEOUT_S,
    ) -> None:
        self._inference = inference
        self._model = model
        self._config = config
        self._body_timeout_s = body_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._place_timeout_s = place_timeout_s
        self._forms = Forms(
            name=model.name,
            encode=model.tokenizer.encode,
            template=config.template,
            defaults=config.defaults,
            marks={text: token_id for text, token_id in model.tokenizer.added_tokens.items() if text in MARKS},
            hidden=MARKS & model.tokenizer.special_tokens.keys(),
        )
        self._idle: list[_Process] = []
        self._turns = ReadingQueue(NUM_PROCESSES)
        self._num_bytes_of: Counter[str] = Counter()
        self.num_in_process = 0  # bodies that were read in another process

    async def read(self, request: Request, kind: type[BaseModel]) -> Understood:
        """Read and parse a request's body.

        Raises:
            HttpRefusal: the body is too large, too slow, or its content type is not JSON.
            BatonError: the request is invalid, or too many bodies are being read.
        """
        body = await read_bytes(request, self._check_num_bytes, self._body_timeout_s)
        job = self._job(kind.__name__, request.headers.get("x-request-id"))
        if is_light(body):
            return understand(body, self._forms, job)
        principal = principal_of(request.scope)
        with self._place_of(principal.name, len(body)):
            parts = await self._ask(job, body, principal.tenant)
        return Understood.from_parts(parts, ChatRequest if issubclass(kind, Translated) else kind)

    async def warm_up(self) -> None:
        """Start one process, so that the first body that is not light need not wait for it."""
        self._idle.append(await self._started())

    async def close(self) -> None:
        """End all processes."""
        idle, self._idle = self._idle, []
        ends = await asyncio.gather(*(process.end() for process in idle), return_exceptions=True)
        for error in ends:
            if error is not None:
                raise error

    def _check_num_bytes(self, num_bytes: int) -> None:
        if num_bytes > self._config.max_body_bytes:
            raise too_large(self._config.max_body_bytes)
        self._inference.check_num_bytes(num_bytes)

    def _job(self, kind: str, request_id: str | None) -> ReadingJob:
        try:
            max_model_len = self._inference.model().max_model_len
        except NoWorker:
            max_model_len = (1 << 31) - 1  # the request is refused later, for lack of workers or for another reason
        template = self._config.template
        return ReadingJob(
            kind=kind,
            request_id=secrets.token_hex(16) if request_id is None else request_id or " ",
            max_answers=self._inference.max_answers,
            max_model_len=max_model_len,
            keeps_schemas=template is not None and template.call_form in READ_BY_TOOLS,
        )

    async def _ask(self, job: ReadingJob, body: bytes, tenant: str) -> list[bytes]:
        self.num_in_process += 1
        frame = job_frame(job, body)
        async with self._turn(tenant):
            error, *parts = await self._answer(frame)
        if error:
            raise from_wire(error.decode("ascii"))
        return parts

    async def _answer(self, frame: bytes) -> list[bytes]:
        if self._idle:
            with suppress(_Ended):  # an idle process may have ended before it was asked; then a new one tries
                return await self._exchange(self._idle.pop(), frame)
        process = await self._started()
        try:
            return await self._exchange(process, frame)
        except _Ended as error:
            log.warning("a process that reads bodies ended with code %s", process.returncode)
            raise InternalError("the body could not be read; the router's log says more") from error

    async def _started(self) -> "_Process":
        """Start a process and send it what it needs to parse bodies."""
        process = await _Process.start()
        try:
            process.writer.write(await asyncio.to_thread(first_frame, self._forms, self._model))
        except BaseException:
            await asyncio.shield(process.end())
            raise
        return process

    async def _exchange(self, process: "_Process", frame: bytes) -> list[bytes]:
        """Send a job to a process and return its reply. Any failure or cancel ends the process.

        Raises:
            _Ended: the process ended, perhaps before it was asked.
            InternalError: it was silent for too long.
        """
        goes_on = False
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                process.writer.write(frame)
                head = await process.reader.readexactly(LENGTH_BYTES)
                size = int.from_bytes(head, "little")
                last, *parts = parted(await process.reader.readexactly(size))
            goes_on = last != LAST
        except TimeoutError as error:
            log.warning("a process that reads bodies said nothing for %g s, and was ended", self._answer_timeout_s)
            raise InternalError("the body could not be read in time; the router's log says more") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise _Ended from error
        finally:
            # A process that is neither idle nor ended would outlive the router, and block the end of the event loop.
            try:
                await self._put_back(process, goes_on=goes_on)
            except BaseException:
                if process not in self._idle:
                    await asyncio.shield(process.end())
                raise
        return parts

    async def _put_back(self, process: "_Process", *, goes_on: bool) -> None:
        """Return a process to the idle ones, or end it."""
        if goes_on:
            self._idle.append(process)
        else:
            await asyncio.shield(process.end())

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold one of the processes' places, waiting for the tenant's turn."""
        try:
            async with asyncio.timeout(self._place_timeout_s):
                give_back = await self._turns.take(tenant)
        except TimeoutError as error:
            message = f"no process came to read the request in {self._place_timeout_s:g} s; try again"
            raise Overloaded(message, limit=NUM_PROCESSES, what="bodies", retry_after_s=RETRY_AFTER_S) from error
        try:
            yield
        finally:
            give_back()

    @contextmanager
    def _place_of(self, principal: str, num_bytes: int) -> Iterator[None]:
        held = self._num_bytes_of
        is_full = held.total() + num_bytes > MAX_WAITING_BYTES
        if is_full or held[principal] + num_bytes > MAX_WAITING_BYTES_OF_ONE:
            message = (
                f"{held.total()} bytes of long requests are being read, the limit; try again in {RETRY_AFTER_S:g} s"
            )
            raise Overloaded(message, limit=MAX_WAITING_BYTES, what="body_bytes", retry_after_s=RETRY_AFTER_S)
        held[principal] += num_bytes
        try:
            yield
        finally:
            held[principal] -= num_bytes
            if not held[principal]:
                del held[principal]


class _Ended(Exception):
    """A process ended without a reply."""


class _Process:
    """One process, connected by a socket that is its stdin and stdout; it ends when the socket closes."""

    def __init__(self, child: "subprocess.Popen[bytes]", streams: tuple[StreamReader, StreamWriter]) -> None:
        self._child = child
        self.reader, self.writer = streams

    @classmethod
    async def start(cls) -> Self:
        """Start a process."""
        ours, theirs = socket.socketpair()
        with theirs:
            # Not asyncio's subprocess: uvloop forks, and gRPC's threads do not tolerate that.
            end = theirs.fileno()
            try:
                child = await asyncio.to_thread(_popen, end)
            except BaseException:
                ours.close()  # which ends a process that has been started
                raise
        streams = None
        try:
            streams = await asyncio.open_connection(sock=ours)
            return cls(child, streams)
        except BaseException:
            (ours if streams is None else streams[1]).close()
            await asyncio.shield(_ended(child))
            raise

    @property
    def returncode(self) -> int | None:
        """Exit code; None while the process runs."""
        return self._child.poll()

    async def end(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        await _ended(self._child)

    def kill(self) -> None:
        """Close the socket and kill the process. Either suffices if the other raises."""
        try:
            self.writer.close()
        finally:
            self._child.kill()


async def _ended(child: "subprocess.Popen[bytes]") -> None:
    try:
        child.kill()
    finally:
        await asyncio.to_thread(child.wait)


def _popen(end: int) -> "subprocess.Popen[bytes]":
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT}  # it needs no secret
    return subprocess.Popen(_COMMAND, stdin=end, stdout=end, env=environment)
