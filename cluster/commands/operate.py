"""Operators' changes to a deployment, over its Admin service."""

from typing import Any

import grpc

from baton.cluster.admin import TIMEOUT_S, error_from_rpc, open_channel
from baton.proto import admin_pb2, admin_pb2_grpc


def drain(
    address: str,
    worker_id: str,
    *,
    grace_s: float | None = None,
    undo: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> admin_pb2.DrainReply:
    """Drain this incarnation of a worker, or undo that; streams that remain after the grace period migrate.

    Args:
        address: address of the router.
        worker_id: id of a live worker.
        grace_s: grace period from now; None: the router's own.
        undo: whether the worker serves again instead.
        timeout_s: timeout of the call.

    Raises:
        BatonError: nothing answers there, or no such worker is alive.
    """
    request = admin_pb2.DrainRequest(worker_id=worker_id, undo=undo)
    if grace_s is not None:
        request.grace_ms = round(1e3 * grace_s)
    reply: admin_pb2.DrainReply = _call(address, "Drain", request, timeout_s)
    return reply


def restart(address: str, worker_id: str, epoch: int, timeout_s: float = TIMEOUT_S) -> admin_pb2.RestartReply:
    """End this incarnation of a worker with everything that it serves; Ray starts another.

    Raises:
        BatonError: nothing answers there, the router does not know the worker, or it is silent.
    """
    request = admin_pb2.RestartRequest(worker_id=worker_id, epoch=epoch)
    reply: admin_pb2.RestartReply = _call(address, "Restart", request, timeout_s)
    return reply


def set_admission(address: str, max_queue_len: int, timeout_s: float = TIMEOUT_S) -> admin_pb2.SetAdmissionReply:
    """Change how many requests the router holds at once.

    Raises:
        BatonError: nothing answers there, or it refuses.
    """
    request = admin_pb2.SetAdmissionRequest(max_queue_len=max_queue_len)
    reply: admin_pb2.SetAdmissionReply = _call(address, "SetAdmission", request, timeout_s)
    return reply


def scale(address: str, num_prefill: int, num_decode: int, timeout_s: float = TIMEOUT_S) -> admin_pb2.ScaleReply:
    """Set the desired numbers of workers; the process of `baton serve` follows.

    Raises:
        BatonError: nothing answers there, or it refuses.
    """
    request = admin_pb2.ScaleRequest(num_prefill=num_prefill, num_decode=num_decode)
    reply: admin_pb2.ScaleReply = _call(address, "Scale", request, timeout_s)
    return reply


def clear_quarantine(
    address: str, fingerprint: str = "", timeout_s: float = TIMEOUT_S
) -> admin_pb2.ClearQuarantineReply:
    """Admit a request again that was refused because workers died of it; without a fingerprint, all of them.

    Raises:
        BatonError: nothing answers there.
    """
    request = admin_pb2.ClearQuarantineRequest(fingerprint=fingerprint)
    reply: admin_pb2.ClearQuarantineReply = _call(address, "ClearQuarantine", request, timeout_s)
    return reply


def _call(address: str, method: str, request: Any, timeout_s: float) -> Any:
    with open_channel(address) as channel:
        try:
            return getattr(admin_pb2_grpc.AdminStub(channel), method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error, address) from error
