"""The synchronous client of Baton: one connection, typed errors, streamed answers."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

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


class BatonClient:
    """A connection to a deployment, made when first needed. Threads may share it.

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
        self._is_closed = False
        self._channel = access.open(address, OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)

    def __enter__(self) -> "BatonClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; open answers end."""
        self._is_closed = True
        self._channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        model: str = "",
        tenant: str = "",
        split_only: bool = False,
    ) -> Iterator[inference_pb2.GenerateChunk]:
        """Return the chunks of one answer, or of `n` concurrent ones, told apart by `choice`; each ends with `finish`.

        Dropping the iterator cancels the request.
        """
        request = generate_request(prompt, token_ids, sampling, model, tenant, split_only=split_only)
        return self._chunks(request)

    def generate_text(
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
        return "".join(chunk.text for chunk in chunks if chunk.choice == 0)

    def tokenize(self, text: str, model: str = "") -> list[int]:
        """Return the token ids of a text."""
        request = inference_pb2.TokenizeRequest(model=checked_text(model, "model"), text=checked_text(text))
        reply: inference_pb2.TokenizeReply = self._call(self._inference.Tokenize, request)
        return list(reply.token_ids)

    def model(self) -> inference_pb2.Model:
        """Return the served model."""
        reply: inference_pb2.Model = self._call(self._inference.GetModel, inference_pb2.GetModelRequest())
        return reply

    def status(self) -> admin_pb2.StatusReply:
        """Return the status of the router and its workers."""
        reply: admin_pb2.StatusReply = self._call(self._admin.Status, admin_pb2.StatusRequest())
        return reply

    def inventory(self) -> admin_pb2.InventoryReply:
        """Return what every live worker holds right now."""
        reply: admin_pb2.InventoryReply = self._call(self._admin.Inventory, admin_pb2.InventoryRequest())
        return reply

    def _chunks(self, request: inference_pb2.GenerateRequest) -> Iterator[inference_pb2.GenerateChunk]:
        attempts = CallAttempts(self._retry, self._timeout_s)
        while True:
            stream = self._begin(self._inference.Generate, request, attempts)
            check = ChunkCheck(request.sampling.n)
            try:
                for chunk in stream:
                    yield check.take(chunk)
                check.end()
                return
            except ProtocolError as error:
                raise check.with_received(error) from None
            except grpc.RpcError as error:
                failed = wire.error_from_rpc(error)
                if check.has_any:
                    raise check.with_received(failed) from error
                pause_s = pause_after(attempts, failed, error)
            finally:
                stream.cancel()
            time.sleep(pause_s)

    def _call(self, method: Any, request: Any) -> Any:
        attempts = CallAttempts(self._retry, self._timeout_s)
        while True:
            try:
                return self._begin(method, request, attempts)
            except grpc.RpcError as error:
                pause_s = pause_after(attempts, wire.error_from_rpc(error), error)
            time.sleep(pause_s)

    def _begin(self, method: Any, request: Any, attempts: CallAttempts) -> Any:
        try:
            return method(request, timeout=attempts.left_s, metadata=self._metadata)
        except ValueError as error:  # raised by gRPC for a closed channel
            if self._is_closed:
                raise RequestCancelled("the client is closed") from error
            raise
