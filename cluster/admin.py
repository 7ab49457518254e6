"""Calls to a deployment's Admin service, with plain data as results."""

from collections import Counter
from typing import Any

import grpc
from google.protobuf.message import Message

from baton.client.access import Access
from baton.client.messages import checked_text
from baton.cluster.access import current_access, open_with
from baton.core.errors import BatonError, MalformedMessage, StartupError, from_wire
from baton.proto import admin_pb2, admin_pb2_grpc, worker_pb2
from baton.proto.secure_channel import is_refused_certificate
from baton.proto.wire import held

ERROR_KEY = "baton-error"
TIMEOUT_S = 5.0
_MISNAMED = ("hostname verification", "is not in peer certificate")  # gRPC's words, by version


def open_channel(address: str, access: Access | None = None) -> grpc.Channel:
    """Open a connection to a deployment with the command's access; it connects on first use.

    Raises:
        InvalidText: the address is not Unicode text.
        ConfigInvalid: certificates or the key cannot be used.
    """
    return open_with(access or current_access(), checked_text(address, "the address"))


def error_from_rpc(error: grpc.RpcError, address: str) -> BatonError:
    """Return the typed error behind a failed call; a call that never reached a deployment gives a StartupError."""
    # gRPC's type stubs disagree about this: pairs of a key and str or bytes.
    metadata: Any = error.trailing_metadata() if isinstance(error, grpc.Call) else None
    for key, value in metadata or ():
        if key == ERROR_KEY:
            try:
                return from_wire(value if isinstance(value, str) else value.decode("ascii", "replace"))
            except MalformedMessage as malformed:
                return malformed
    code = error.code() if isinstance(error, grpc.Call) else None
    details = (error.details() or "") if isinstance(error, grpc.Call) else ""
    if code is grpc.StatusCode.UNAVAILABLE or is_refused_certificate(error):
        return StartupError(_unreached(error, details, address), address=address)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return StartupError(f"{address} did not answer in time", address=address, timed_out=True)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        message = f"{address} is not where operators come; use the admin port's address, which `baton serve` printed"
        return StartupError(message, address=address)
    if not isinstance(error, grpc.Call):
        return BatonError(f"the call to {address} failed: {error}", address=address)
    return BatonError(f"{address} answered {error.code().name}: {error.details()}", address=address)


def _unreached(error: grpc.RpcError, details: str, address: str) -> str:
    """Why nothing was reached at an address, from gRPC's words."""
    host = address.rpartition(":")[0]
    if any(sign in details.lower() for sign in _MISNAMED):
        name = current_access().tls.server_name or host
        return f"the certificate of {address} does not name {name}; --tls-server-name gives the name that it has"
    if is_refused_certificate(error):
        return f"{address} and this end do not accept each other's certificates: {details}"
    if "Failed parsing HTTP/2" in details:
        return f"what answers at {address} does not speak gRPC; use an address of gRPC that `baton serve` printed"
    if "errors resolving" in details:
        return f"no deployment at {address}: the name {host} does not resolve"
    is_closed = "Connection refused" not in details and not address.startswith("unix:")
    perhaps = ""
    if current_access().tls.is_on and is_closed:
        perhaps = ", or it does not accept this certificate"
    elif "failed to connect" in details and is_closed:  # as a server does that expects TLS
        perhaps = ", or it speaks TLS: give --tls-ca-file"
    return f"no deployment answers at {address}{perhaps}; `baton serve` starts one"


def fetch_status(address: str, timeout_s: float = TIMEOUT_S, access: Access | None = None) -> admin_pb2.StatusReply:
    """Fetch the router's view of itself and its workers.

    Raises:
        BatonError: nothing answers there, or it answers with an error.
    """
    with open_channel(address, access) as channel:
        try:
            reply: admin_pb2.StatusReply = admin_pb2_grpc.AdminStub(channel).Status(
                admin_pb2.StatusRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise error_from_rpc(error, address) from error
    return reply


def fetch_inventory(address: str, timeout_s: float = TIMEOUT_S) -> admin_pb2.InventoryReply:
    """Fetch what every worker holds right now.

    Raises:
        BatonError: nothing answers there, or it answers with an error.
    """
    with open_channel(address) as channel:
        try:
            reply: admin_pb2.InventoryReply = admin_pb2_grpc.AdminStub(channel).Inventory(
                admin_pb2.InventoryRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise error_from_rpc(error, address) from error
    return reply


def set_speculation(
    address: str, num_draft_tokens: int | None, timeout_s: float = TIMEOUT_S
) -> admin_pb2.SetSpeculationReply:
    """Change the number of drafts per step of the decode workers; None lets measurements decide.

    Raises:
        BatonError: nothing answers there, or it answers with an error.
    """
    mode = worker_pb2.SpeculationMode(auto=True)
    if num_draft_tokens is not None:
        mode = worker_pb2.SpeculationMode(num_draft_tokens=num_draft_tokens)
    with open_channel(address) as channel:
        try:
            reply: admin_pb2.SetSpeculationReply = admin_pb2_grpc.AdminStub(channel).SetSpeculation(
                admin_pb2.SetSpeculationRequest(mode=mode), timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise error_from_rpc(error, address) from error
    return reply


def as_data(message: Message) -> dict[str, Any]:
    """Convert a protobuf message to JSON-able data: every field, unset ones as defaults, epochs and bytes as hex."""
    data: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            data[field.name] = dict(value)
        elif field.type == field.TYPE_MESSAGE:
            repeated = not isinstance(value, Message)
            data[field.name] = [as_data(item) for item in value] if repeated else as_data(value)
        elif field.type == field.TYPE_BYTES:
            data[field.name] = value.hex()
        elif field.name in ("epoch", "kv_epoch"):
            data[field.name] = f"{value:016x}"  # most JSON readers cannot represent 64-bit integers
        else:
            data[field.name] = value if isinstance(value, (str, int, float)) else list(value)
    return data


def held_resources(reply: admin_pb2.InventoryReply) -> dict[str, int]:
    """Sum each countable resource over all workers; all are zero when no request lives."""
    total = Counter(held(worker_pb2.Inventory()))
    for worker in reply.workers:
        total.update(held(worker.state.inventory))
    return dict(total)
