"""`baton drain`: moves all streams off one worker, so that it can be stopped, or undoes that."""

import time
from typing import Final

import grpc

from baton.cluster.admin import TIMEOUT_S, error_from_rpc, fetch_status, open_channel
from baton.cluster.outcome import ExitCode, Output
from baton.core.errors import ConfigInvalid, InvalidRequest
from baton.proto import admin_pb2, admin_pb2_grpc

POLL_S: Final = 0.2


def drain(
    worker_id: str, address: str, output: Output, *, grace_s: float | None, wait_s: float, undo: bool
) -> ExitCode:
    """Drain a worker, and wait until no stream depends on it. PARTIAL if some still do, or the drain was undone.

    PARTIAL also if the worker ended meanwhile.

    Args:
        worker_id: id as in `baton status`.
        address: address of the deployment.
        output: output of the command.
        grace_s: time for its streams to finish; None: the deployment's own.
        wait_s: time to wait until they are gone; 0: do not wait.
        undo: whether to let it serve again.

    Raises:
        ConfigInvalid: a time is invalid, or there is a grace period for an undo.
        BatonError: no deployment answers at `address`, or it knows no such worker.
    """
    if (grace_s is not None and not 0 <= grace_s < 1e6) or not 0 <= wait_s < 1e6:
        raise ConfigInvalid("grace and wait are seconds, 0 or more", keys=["grace", "wait"])
    if undo and grace_s is not None:
        raise ConfigInvalid("a worker that serves again needs no grace", keys=["undo", "grace"])
    request = admin_pb2.DrainRequest(worker_id=worker_id, undo=undo)
    if grace_s is not None:
        request.grace_ms = int(1e3 * grace_s)
    before = _look(address, worker_id, must_be_known=True)
    reply = _ask(address, request)
    draining, num_streams, ended = reply.draining, reply.num_streams, ""
    deadline_s = time.monotonic() + wait_s
    while not ended and draining and num_streams and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        worker = _look(address, worker_id)  # a repeated drain request would undo another operator's --undo
        draining, num_streams = worker.draining, worker.num_streams
        if worker.state.epoch != before.state.epoch:
            ended = f"{worker_id} has ended meanwhile" + "; its next incarnation is not drained" * worker.alive
        elif not draining:
            ended = f"{worker_id} serves again: another call has put it back"
    text = ended or _sentence(worker_id, draining, num_streams)
    data = {"address": address, "worker_id": worker_id, "draining": draining, "num_streams": num_streams}
    unserved = "" if undo else _unserved(fetch_status(address))
    output.emit(data | {"message": text, "warning": unserved}, text)
    if unserved:
        output.note(f"baton: {unserved}; `baton drain {worker_id} --undo` lets it serve again", "WARNING")
    return ExitCode.PARTIAL if ended or (draining and num_streams) else ExitCode.OK


def _unserved(status: admin_pb2.StatusReply) -> str:
    """Why new requests are refused while workers drain; empty if they are not."""
    serving = {one.state.role for one in status.workers if one.alive and not one.draining}
    if "decode" not in serving:
        return "new requests are refused: no decode worker takes them"
    if "prefill" not in serving and not status.local_prefill.only_way:
        return "new requests are refused: no prefill worker takes them, and decode workers compute no prompts"
    return ""


def _sentence(worker_id: str, draining: bool, num_streams: int) -> str:
    if not draining:
        return f"{worker_id} serves"
    if num_streams:
        return f"{worker_id} gets nothing new; {num_streams} streams are still there: ask again, or --wait"
    return f"{worker_id} is empty and can be stopped"


def _look(address: str, worker_id: str, *, must_be_known: bool = False) -> admin_pb2.WorkerStatus:
    """Return the worker as the router knows it, without changing anything; without an epoch if it knows none.

    Raises:
        InvalidRequest: `must_be_known`, and the router does not know it.
    """
    workers = {one.state.worker_id: one for one in fetch_status(address).workers}
    if must_be_known and worker_id not in workers:
        message = f"no worker {worker_id[:200]!r} is known; known are {', '.join(workers) or 'none'}"
        raise InvalidRequest(message, field="worker_id", known=list(workers))
    return workers.get(worker_id, admin_pb2.WorkerStatus())


def _ask(address: str, request: admin_pb2.DrainRequest) -> admin_pb2.DrainReply:
    with open_channel(address) as channel:
        try:
            reply: admin_pb2.DrainReply = admin_pb2_grpc.AdminStub(channel).Drain(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise error_from_rpc(error, address) from error
    return reply
