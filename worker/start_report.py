"""Tells the router what a starting worker does, from a thread of its own. It never delays or fails the start.

A phase is stored by one assignment, and the thread sends the latest one each second: parts of the start that hold the
GIL only delay a report. A router that does not answer is asked again a second later. Rank 0 reports for its TP group.
"""

import logging
import threading
from types import TracebackType
from typing import Final

import grpc

from baton.core.config import WorkerConfig
from baton.core.errors import BatonError
from baton.core.inside import Caller
from baton.core.start_phase import STARTING, OnPhase, StartPhase
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.proto.inside import InsideChannel
from baton.proto.secure_channel import SecureChannels
from baton.worker.host import ROUTER_OPTIONS, worker_identity
from baton.worker.router_incarnation import RouterIncarnation

REPORT_S: Final = 1.0
TIMEOUT_S: Final = 2.0

log = logging.getLogger(__name__)


class StartReport:
    """Context manager around a worker's start: reports the phases inside, and ends without waiting for the router.

    The reports end with the body, also if it fails; heartbeats begin there.

    Args:
        config: of the worker; without a router's address nothing is sent.
        role: its role.
        epoch: epoch of this incarnation.
    """

    def __init__(self, config: WorkerConfig, role: str, epoch: int) -> None:
        self._config = config
        self._identity = worker_identity(config, role, epoch)
        self._phase = StartPhase(STARTING)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="start-report", daemon=True)

    def __enter__(self) -> OnPhase:
        if self._config.router_address:
            self._thread.start()
        return self._set

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()  # a call under way ends by its timeout; the router ignores it once the worker has joined

    def _set(self, text: str, num_done: int, num_total: int) -> None:
        self._phase = StartPhase(text, num_done, num_total)

    def _run(self) -> None:
        try:
            caller = self._identity.caller
            channel = SecureChannels(self._config.tls).open(self._config.router_address, ROUTER_OPTIONS)
        except BatonError as error:  # of the key or the certificates; the worker's server will raise it
            log.debug("the start is not reported: %s", error)
            return
        with channel:
            self._report(channel, caller)

    def _report(self, channel: grpc.Channel, caller: Caller) -> None:
        router = RouterIncarnation()
        stub = worker_pb2_grpc.MembershipStub(InsideChannel(channel, caller, lambda: router.name))
        while not self._is_over.is_set():
            is_met = False  # then the report is repeated at once
            try:
                stub.Starting(self._message(), timeout=TIMEOUT_S)
                router.is_meeting = False
            except grpc.RpcError as error:
                is_met = router.meets(error)
                if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return  # a router of an earlier version
            if not is_met:
                self._is_over.wait(REPORT_S)

    def _message(self) -> worker_pb2.StartingWorker:
        phase, identity = self._phase, self._identity
        return worker_pb2.StartingWorker(
            worker_id=identity.worker_id,
            role=identity.role,
            epoch=identity.epoch,
            phase=phase.text,
            num_done=phase.num_done,
            num_total=phase.num_total,
        )
