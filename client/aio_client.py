"""The asyncio client of Baton: the same methods as the synchronous client, awaited."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc
import grpc.aio

from baton.client.access import Access
from baton.client.messages import (
    NO_RETRY,
    OPTIONS,
    CallAttempts,
    ChunkCheck,
    RetryPolicy,
    Sampling,
    checked_text,
    checked_timeout_s,
    generate_request,
    pause_after,
)
from baton.core.errors import ProtocolError, RequestCancelled
from baton.proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, wire

CLOSED: Final = "the client is closed"


class AsyncBatonClient:
    """A connection to a deployment, made when first needed; belongs to one event loop.

    Every method raises the typed error of `baton.core.errors` that the server sent, WorkerLost if no server answers at
    the address, and RequestCancelled if the client is or gets closed.

    Args:
        address: "host:port" of the router.
        timeout_s: time limit of each call, including the whole answer; ConfigInvalid unless positive and finite.
        access: certificates and an API key; ConfigInvalid if its files cannot be used.
        retry: repeats calls whose errors say that this may help, within `timeout_s`, and only while nothing of the
            answer has arrived; None: no retries. A later error has what has arrived in its field `received`.
    """

    def __init__(
        self, address: str, timeout_s: float = 600.0, access: Access | None = None, retry: RetryPolicy | None = None
    ) -> None:
        self._timeout_s = checked_timeout_s(timeout_s)
        self._retry = retry or NO_RETRY
        access = access or Access()
        self._metadata = access.metadata
        self._channel = access.open_aio(address, OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)

    async def __aenter__(self) -> "AsyncBatonClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; open answers end."""
        await self._channel.close(None)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        model: str = "",
        tenant: str = "",
        split_only: bool = False,
    ) -> AsyncIterator[inference_pb2.GenerateChunk]:
        """Yield the chunks of one answer, or of `n` concurrent ones, told apart by `choice`; each ends with `finish`.

        Closing the iterator cancels the request.
        """
        request = generate_request(prompt, token_ids, sampling, model, tenant, split_only=split_only)
        attempts = CallAttempts(self._retry, self._timeout_s)
        while True:
            check = ChunkCheck(request.sampling.n)
            stream: Any = self._begin(self._inference.Generate, request, attempts)
            try:
                async for chunk in stream:
                    yield check.take(chunk)
                check.end()
                return
            except ProtocolError as error:
                raise check.with_received(error) from None
            except asyncio.CancelledError:
                if wire.is_cancelled():
                    raise
                raise check.with_received(RequestCancelled(CLOSED)) from None
            except grpc.RpcError as error:
                failed = wire.error_from_rpc(error)
                if check.has_any:
                    raise check.with_received(failed) from error
                pause_s = pause_after(attempts, failed, error)
            finally:
                stream.cancel()
            await asyncio.sleep(pause_s)

    async def generate_text(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        model: str = "",
        tenant: str = "",
    ) -> str:
        """Return the whole text of one answer (with `n`, the first)."""
        chunks = self.generate(prompt, token_ids=token_ids, sampling=sampling, model=model, tenant=tenant)
        return "".join([chunk.text async for chunk in chunks if chunk.choice == 0])

    async def tokenize(self, text: str, model: str = "") -> list[int]:
        """Return the token ids of a text."""
        request = inference_pb2.TokenizeRequest(model=checked_text(model, "model"), text=checked_text(text))
        reply: inference_pb2.TokenizeReply = await self._call(self._inference.Tokenize, request)
        return list(reply.token_ids)

    async def model(self) -> inference_pb2.Model:
        """Return the served model."""
        reply: inference_pb2.Model = await self._call(self._inference.GetModel, inference_pb2.GetModelRequest())
        return reply

    async def status(self) -> admin_pb2.StatusReply:
        """Return the status of the router and its workers."""
        reply: admin_pb2.StatusReply = await self._call(self._admin.Status, admin_pb2.StatusRequest())
        return reply

    async def inventory(self) -> admin_pb2.InventoryReply:
        """Return what every live worker holds right now."""
        reply: admin_pb2.InventoryReply = await self._call(self._admin.Inventory, admin_pb2.InventoryRequest())
        return reply

    async def _call(self, method: Any, request: Any) -> Any:
        attempts = CallAttempts(self._retry, self._timeout_s)
        while True:
            try:
                return await self._begin(method, request, attempts)
            except asyncio.CancelledError:
                if wire.is_cancelled():
                    raise
                raise RequestCancelled(CLOSED) from None
            except grpc.RpcError as error:
                pause_s = pause_after(attempts, wire.error_from_rpc(error), error)
            await asyncio.sleep(pause_s)

    def _begin(self, method: Any, request: Any, attempts: CallAttempts) -> Any:
        try:
            return method(request, timeout=attempts.left_s, metadata=self._metadata)
        except grpc.aio.UsageError as error:
            raise RequestCancelled(CLOSED) from error
